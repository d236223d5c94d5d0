"""Hooks for settings that mkdocs.yml cannot express: URLs of pyproject.toml, pages outside docs/, links between both places."""

from __future__ import annotations

import posixpath
import re
import sys
import tomllib
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.structure.toc import AnchorLink

ROOT = Path(__file__).parents[1]
API, MERMAID = ROOT / "build" / "api.md", Path(sys.prefix) / "mermaid.min.js"
BESIDE = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "reporting.md"}
SOURCES = {page: source for source, page in BESIDE.items()}
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the URLs of the project."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    config.site_url, config.repo_url = f"{urls['Documentation'].rstrip('/')}/", urls["Repository"]
    config.repo_name = "/".join(config.repo_url.split("/")[-2:])
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages beside docs/, the page of the API written by `make docs`, and mermaid for diagrams. Without it pages
    load mermaid from another host.
    """
    paths = {page: ROOT / source for source, page in BESIDE.items()} | {path.name: path for path in (API, MERMAID)}
    for name, path in paths.items():
        if path.exists():
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to pages of the site, also links that name the site for readers of the repository, and other links to the
    repository. Mark examples with prompts, so that copying omits the prompts.
    """
    source = SOURCES.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def resolve(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        if path in BESIDE or path.startswith("docs/"):
            return BESIDE.get(path, path.removeprefix("docs/"))
        return f"{config.repo_url}/blob/main/{path}" if (ROOT / path).exists() else match[1]

    page.edit_url = f"{config.repo_url}/edit/main/{source}" if (ROOT / source).exists() else None
    markdown = re.sub(rf"(?<=\]\(){re.escape(config.site_url)}(\w+)\.html", r"\1.md", markdown)
    markdown = LINK.sub(resolve, markdown).replace("```python\n>>> ", "```pycon\n>>> ")
    if "```mermaid" in markdown and files.get_file_from_path("mermaid.min.js"):
        markdown += '\n\n<script src="mermaid.min.js"></script>\n'
    return markdown


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> None:
    """Shorten the table of contents: omit the class before the names of its members."""
    for heading in page.toc:
        shorten(heading)


def shorten(heading: AnchorLink) -> None:
    """Omit the title of a heading at the beginning of the titles below it."""
    for child in heading.children:
        child.title = child.title.removeprefix(f"{heading.title}.")
        shorten(child)
