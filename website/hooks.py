"""Hooks for settings that mkdocs.yml cannot express: URLs of pyproject.toml, two sites over the same pages, pages outside
docs/, links between all of these, and the README's installation.
"""

from __future__ import annotations

import json
import posixpath
import re
import sys
import tomllib
from pathlib import Path

import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
BUILD, MERMAID = ROOT / "build", Path(sys.prefix) / "mermaid.min.js"
BESIDE = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "index.md", "SECURITY.md": "reporting.md"}
MAINTAINERS = yaml.safe_load((ROOT / "mkdocs-maintainers.yml").read_text())
FOLDER = MAINTAINERS["extra"]["folder"]
PAGES = {f"docs/{path}" for entry in MAINTAINERS["nav"] for path in entry.values() if path not in BESIDE.values()}
"""Pages of docs/ on the site of maintainers."""
INSTALLATION = re.compile(r"^```sh\n.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")
BOOSTS = {"api": 0.1, "ports": 0.6}
"""Names of the API, and of others' engines, are found by these names; for other words, pages that explain them come first."""
KEYWORDS = Path(__file__).with_name("keywords.yml")


def find_place(source: str) -> str | None:
    """Return the place on the sites of a file of the repository, or None.

    >>> find_place("docs/start.md"), find_place("docs/design.md"), find_place("SECURITY.md"), find_place("Makefile")
    ('start.md', 'maintainers/design.md', 'maintainers/reporting.md', None)
    """
    if source in BESIDE:
        return FOLDER + BESIDE[source]
    if not source.startswith("docs/"):
        return None
    return f"{FOLDER if source in PAGES else ''}{source.removeprefix('docs/')}"


SOURCES = {find_place(source): source for source in BESIDE}


def get_folder(config: MkDocsConfig) -> str:
    """Return the folder of a site below the URL of the documentation."""
    return str(config.extra.get("folder", ""))


def get_root(config: MkDocsConfig) -> str:
    """Return the URL of the documentation, below which both sites are."""
    return str(config.site_url).removesuffix(get_folder(config))


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the URLs of the project, and the places of the pages that tools/api_reference.py wrote."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    config.site_url, config.repo_url = f"{urls['Documentation'].rstrip('/')}/{get_folder(config)}", urls["Repository"]
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
    """Keep the pages of this site. Add those beside docs/ or those of the API, and mermaid for diagrams. Without it pages load
    mermaid from another host.
    """
    folder = get_folder(config)
    for file in [*files.documentation_pages()]:
        if (f"docs/{file.src_uri}" in PAGES) != bool(folder):
            files.remove(file)
    paths = {MERMAID.name: MERMAID}
    if folder:
        paths |= {page: ROOT / source for source, page in BESIDE.items()}
    else:
        paths |= {path.relative_to(BUILD).as_posix(): path for path in (BUILD / "api.md", *(BUILD / "api").glob("*.md"))}
    for name, path in paths.items():
        if path.exists():
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to pages of this site, also those that name the site for readers of the repository; to URLs of the other
    site; and other links to the repository. Mark examples with prompts, so that copying omits the prompts. Show the README's
    commands that install pagepool.
    """
    folder, root = get_folder(config), get_root(config)
    source = SOURCES.get(folder + page.file.src_uri, f"docs/{page.file.src_uri}")

    def resolve(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        place = find_place(path)
        if place is None:
            return f"{config.repo_url}/blob/main/{path}" if (ROOT / path).exists() else match[1]
        if place.startswith(FOLDER) == bool(folder):
            return posixpath.relpath(place.removeprefix(folder), posixpath.dirname(page.file.src_uri) or ".")
        return root + re.sub(r"\.md$", ".html", place)

    if boost := BOOSTS.get(re.split(r"[/.]", page.file.src_uri)[0]):
        page.meta["search"] = {"boost": boost}
    page.edit_url = f"{config.repo_url}/edit/main/{source}" if (ROOT / source).exists() else None
    if not folder:
        markdown = re.sub(rf"(?<=\]\(){re.escape(root)}(\w+)\.html", r"\1.md", markdown)
    if "<!-- install -->" in markdown:
        commands = INSTALLATION.search((ROOT / "README.md").read_text())
        markdown = markdown.replace("<!-- install -->", commands[0] if commands else "")
    markdown = LINK.sub(resolve, markdown).replace("```python\n>>> ", "```pycon\n>>> ")
    if "```mermaid" in markdown and files.get_file_from_path("mermaid.min.js"):
        markdown += '\n\n<script src="mermaid.min.js"></script>\n'  # no page in a folder has a diagram
    return markdown


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Make links and pictures between the sites relative, so that the built pages can be opened as files."""
    start = posixpath.dirname(get_folder(config) + page.url) or "."

    def shorten(match: re.Match[str]) -> str:
        return f'{match[1]}{posixpath.relpath(match[2] or "index.html", start)}{match[3]}"'

    return re.sub(rf'(<(?:a|img)\b[^>]*\s(?:href|src)="){re.escape(get_root(config))}([^"#]*)(#?[^"]*)"', shorten, output)


def on_post_build(config: MkDocsConfig) -> None:
    """Add the keywords to the index of the search, which the theme has written. Raise KeyError for a page or heading that does
    not exist.
    """
    if get_folder(config):
        return
    path = Path(config.site_dir) / "search" / "search_index.json"
    index = json.loads(path.read_text())
    entries = {entry["location"]: entry for entry in index["docs"]}
    for location, keywords in yaml.safe_load(KEYWORDS.read_text()).items():
        entries[location]["tags"] = keywords.split(", ")
    path.write_text(json.dumps(index, separators=(",", ":")))
