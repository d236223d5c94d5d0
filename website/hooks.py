"""What mkdocs.yml cannot say: URLs of pyproject.toml, pages that lie outside docs/, links from one place to the other."""

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
    """Take the URLs of the project."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    config.site_url, config.repo_url = f"{urls['Documentation'].rstrip('/')}/", urls["Repository"]
    config.repo_name = "/".join(config.repo_url.split("/")[-2:])
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages beside docs/, that of the API, which `make docs` writes, and what draws diagrams: without it pages load it
    from another host.
    """
    paths = {page: ROOT / source for source, page in BESIDE.items()} | {path.name: path for path in (API, MERMAID)}
    for name, path in paths.items():
        if path.exists():
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to pages, also where documents name the site for readers of the repository, or to the repository; mark
    examples as such, since their prompts are not to be copied.
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
    """Leave the class out before the names of its members, in the table of contents."""
    for heading in page.toc:
        shorten(heading)


def shorten(heading: AnchorLink) -> None:
    """Leave the title of a heading out where those below it begin with it."""
    for child in heading.children:
        child.title = child.title.removeprefix(f"{heading.title}.")
        shorten(child)
