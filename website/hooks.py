"""Hooks for settings that mkdocs.yml cannot express: URLs of pyproject.toml, pages outside docs/, links between both places,
and the README's installation.
"""

from __future__ import annotations

import json
import posixpath
import re
import sys
import tomllib
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
BUILD, MERMAID = ROOT / "build", Path(sys.prefix) / "mermaid.min.js"
BESIDE = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "reporting.md"}
UNSEARCHED = ("changelog.md", "benchmarks.md", "design.md")  # they mention everything, and explain the use of nothing
SOURCES = {page: source for source, page in BESIDE.items()}
INSTALLATION = re.compile(r"^```sh\n.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the URLs of the project, and the places of the pages that tools/api_reference.py wrote."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    config.site_url, config.repo_url = f"{urls['Documentation'].rstrip('/')}/", urls["Repository"]
    config.repo_name = "/".join(config.repo_url.split("/")[-2:])
    sections = json.loads((BUILD / "api.json").read_text())
    for tab in config.nav or []:
        for pages in tab.values():
            for page in pages if isinstance(pages, list) else []:
                if page.get("API") == "api.md":
                    parts = [{title: [{name: path} for name, path in names]} for title, names in sections.items()]
                    page["API"] = [{"All names": "api.md"}, *parts]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages beside docs/, the pages of the API written by `make docs`, and mermaid for diagrams. Without it pages
    load mermaid from another host.
    """
    paths = {page: ROOT / source for source, page in BESIDE.items()} | {MERMAID.name: MERMAID}
    paths |= {path.relative_to(BUILD).as_posix(): path for path in (BUILD / "api.md", *(BUILD / "api").glob("*.md"))}
    for name, path in paths.items():
        if path.exists():
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to pages of the site, also links that name the site for readers of the repository, and other links to the
    repository. Mark examples with prompts, so that copying omits the prompts. Show the README's commands that install pagepool.
    """
    source = SOURCES.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def resolve(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        if path in BESIDE or path.startswith("docs/"):
            return posixpath.relpath(BESIDE.get(path, path.removeprefix("docs/")), posixpath.dirname(page.file.src_uri) or ".")
        return f"{config.repo_url}/blob/main/{path}" if (ROOT / path).exists() else match[1]

    if page.file.src_uri in UNSEARCHED:
        page.meta["search"] = {"exclude": True}
    page.edit_url = f"{config.repo_url}/edit/main/{source}" if (ROOT / source).exists() else None
    markdown = re.sub(rf"(?<=\]\(){re.escape(config.site_url)}(\w+)\.html", r"\1.md", markdown)
    if "<!-- install -->" in markdown:
        commands = INSTALLATION.search((ROOT / "README.md").read_text())
        markdown = markdown.replace("<!-- install -->", commands[0] if commands else "")
    markdown = LINK.sub(resolve, markdown).replace("```python\n>>> ", "```pycon\n>>> ")
    if "```mermaid" in markdown and files.get_file_from_path("mermaid.min.js"):
        markdown += '\n\n<script src="mermaid.min.js"></script>\n'  # no page in a folder has a diagram
    return markdown
