"""What the site has beyond the pages of docs/: files of the repository that pages link to, and what sources say.

A link from a page to a file outside of docs/ becomes one to a page made of that file. The API reference has a page for
each public module, and the page of error messages has every sentence that the sources can raise.
"""

from __future__ import annotations

import ast
import json
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))  # for the module beside this one

import messages

SITE = Path(__file__).parent
ROOT = SITE.parents[1]
ROLE = re.compile(
    r":(?:class|func|meth|data|attr|mod|exc):(?=<code)"
)  # of docstrings: marks that Markdown does not know
SHIM = re.compile(r'src="https://unpkg.com/iframe-worker/shim"')
FOREIGN = re.compile(r"""<(?:script|img|iframe|source)[^>]*\ssrc=["']?(?:https?:)?//[^>]*>""")
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[)#])")
MARKED = re.compile(r"^```(\w+) .*$", re.MULTILINE)
"""A fence with a word for the tests after its language, such as `no-run`, which the site's Markdown does not know."""
PAGES = {
    "README.md": "project/readme.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "LICENSE": "project/license.md",
}
"""Files of the repository, and the pages that they are in the site."""

MODULES = {
    "shardfold": "The package: `import shardfold as sf`.",
    "shardfold.optim": "Optimizers that update shards, and schedules.",
    "shardfold.nn": "Layers and losses.",
    "shardfold.numerics": "Clipping, loss scales, and where inf came from.",
    "shardfold.parallel": "Layers and sequences that are divided over ranks.",
    "shardfold.checkpoint": "Checkpoints without an engine.",
    "shardfold.errors": "Every exception that Shardfold raises on purpose.",
    "shardfold.testing": "Several ranks in a test, and a simulated accelerator.",
    "shardfold.compat": "DeepSpeed's interface over the engine.",
}
"""The public modules, and what each is for."""

BOOSTS = {"troubleshooting": 4, "howto/everyday": 2, "howto/": 4, "tutorial/": 2, "concepts/": 2,
          "deepspeed-names": 0.2, "reference/messages": 0.6, "reference/": 0.5}  # fmt: skip
"""By how a page's path begins: how much it counts in the search, where others count 1."""


def page_of(path: str) -> str | None:
    """The page that a file of the repository is, by its path there; None: it is none."""
    if path in PAGES:
        return PAGES[path]
    if path.rstrip("/") == "examples":
        return "examples/all.md"
    return f"{path}.md" if path.startswith("examples/") and (ROOT / path).is_file() else None


def on_files(files: Files, *, config: Any) -> Files:
    made = {page: source(name) for name, page in PAGES.items()}
    examples = sorted(
        path for path in (ROOT / "examples").iterdir() if path.is_file() and path.suffix in (".py", ".json", ".ipynb")
    )
    for path in examples:
        made[f"examples/{path.name}.md"] = (
            notebook(path)
            if path.suffix == ".ipynb"
            else f"# {path.name}\n\n```{path.suffix[1:]}\n{path.read_text(encoding='utf-8')}```\n"
        )
    rows = [f"- [{path.name}]({path.name}.md): {said(path)}" for path in examples if path.suffix != ".json"]
    made["examples/all.md"] = "\n".join(["# Examples", "", *rows, ""])
    made |= {f"reference/{module}.md": reference(module, meaning) for module, meaning in MODULES.items()}
    made["reference/messages.md"] = messages.page()
    made |= {f"assets/{name}": (SITE / name).read_text(encoding="utf-8") for name in ("site.css", "worker.js")}
    for uri, text in made.items():
        files.append(File.generated(config, uri, content=text))
    return files


def public(module: str) -> list[str]:
    """The names in a module's ``__all__``, without those of modules."""
    path = ROOT / "src" / Path(*module.split("."))
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8"))
    lists = [node.value for node in tree.body if isinstance(node, ast.Assign) and _is_all(node.targets[0])]
    names = ast.literal_eval(lists[0]) if lists else []
    return sorted(name for name in names if f"{module}.{name}" not in MODULES)


def _is_all(target: ast.expr) -> bool:
    return isinstance(target, ast.Name) and target.id == "__all__"


def reference(module: str, meaning: str) -> str:
    return "\n".join([f"# {module}", "", meaning, "", *(f"::: {module}.{name}\n" for name in public(module))])


def source(name: str) -> str:
    text = (ROOT / name).read_text(encoding="utf-8")
    return text if name.endswith(".md") else f"# License\n\n```text\n{text}```\n"


def notebook(path: Path) -> str:
    """A notebook as a page: its texts, its code, and what that printed."""
    parts: list[str] = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(f"```python\n{text}\n```" if cell["cell_type"] == "code" else text)
        parts += [f"```text\n{''.join(each['text'])}```" for each in cell.get("outputs", ())]
    return "\n\n".join([*parts, ""])


def said(path: Path) -> str:
    """The first sentences of a script or of a notebook."""
    if path.suffix == ".ipynb":
        return " ".join(notebook(path).split("\n\n")[1].split())
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Links to files outside of docs/ lead to their pages. How much a page counts in the search is set, too."""
    uri = page.file.src_uri
    if found := [boost for part, boost in BOOSTS.items() if uri.startswith(part)]:
        page.meta["search"] = {"boost": found[0]}
    origin = {target: name for name, target in PAGES.items()}.get(uri)
    base = posixpath.dirname(origin) if origin else posixpath.join("docs", posixpath.dirname(uri))

    def led(match: re.Match[str]) -> str:
        target = match[1]
        if "://" in target or target.startswith("mailto:"):
            return target
        path = posixpath.normpath(posixpath.join(base, target))
        found = path.removeprefix("docs/") if path.startswith("docs/") else page_of(path)
        return posixpath.relpath(found, posixpath.dirname(uri) or ".") if found else target

    return MARKED.sub(r"```\1", LINK.sub(led, markdown))


def on_page_content(html: str, *, page: Any, config: Any, files: Files) -> str:
    """Without the marks of roles in front of names in docstrings. A fence that is shown as text is an error."""
    if "<p>```" in html:
        raise PluginError(f"{page.file.src_uri}: a block of code is shown as text, as its first line is not understood")
    return ROLE.sub("", html)


def on_post_page(output: str, *, page: Any, config: Any) -> str:
    return local(output, posixpath.dirname(page.file.dest_uri))


def on_post_template(output_content: str, *, template_name: str, config: Any) -> str:
    return local(output_content, "") if template_name.endswith(".html") else output_content


def local(html: str, folder: str) -> str:
    """Nothing is fetched from elsewhere: the theme's worker for pages on disk is the one beside this file."""
    own = posixpath.relpath("assets/worker.js", folder or ".")
    html = SHIM.sub(f'src="{own}"', html)
    if found := FOREIGN.search(html):
        raise PluginError(f"a page in '{folder}' would fetch from the network when it is read: {found[0]}")
    return html
