"""Which edits of imported code are noticed: real imports, in a process of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import importlib, os, pathlib, sys, zipfile
from polytrain.workers.processes.preload import CodeFiles

files = CodeFiles()
with files.noting():
{imports}
files.note_imported()
assert not any(finder is files for finder in sys.meta_path)
assert files.are_current()
{edit}
print(files.are_current())
"""


def is_current_after(directory: Path, edit: str, *, imports: str = "import beside") -> bool:
    """Whether a process that has imported a module beside it finds it unchanged after an edit."""
    package = directory / "beside"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text("from beside import below\n")
    (package / "below.py").write_text("import json\ntry:\n import numbers\nfinally: value = 1\n")
    script = SCRIPT.format(edit=edit, imports=f"    {imports}")
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(directory)!r})\n{script}"],
        capture_output=True,
        text=True,
        cwd=directory,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout == "True\n"


@pytest.mark.parametrize(
    ("edit", "is_current"),
    [
        ("", True),
        ("pathlib.Path('beside/unused.py').touch()", True),
        ("os.utime('beside/below.py', ns=(1, 1))", False),
        ("open('beside/below.py', 'a').write('other = 2')", False),
        ("os.remove('beside/__init__.py')", False),
        ("os.chdir('/')", True),
    ],
)
def test_an_edit_of_what_a_module_imports_is_noticed(
    tmp_path: Path, edit: str, is_current: bool
) -> None:
    assert is_current_after(tmp_path, edit) is is_current


def test_a_module_whose_import_fails_is_noticed(tmp_path: Path) -> None:
    """Corrected, it must be imported again with all that it had imported before it failed."""
    (tmp_path / "broken.py").write_text("import beside\nraise ValueError")
    imports = "\n    ".join(["try: import broken", "except ValueError: pass"])
    edit = "open('broken.py', 'w').write('')"
    assert not is_current_after(tmp_path, edit, imports=imports)


def test_an_edit_while_a_module_is_imported_is_noticed(tmp_path: Path) -> None:
    """What was read, the old or the new text, isn't known."""
    (tmp_path / "edits.py").write_text("open(__file__, 'a').write('#')")
    script = SCRIPT.format(imports="    import edits", edit="")
    script = script.replace("assert files.are_current()\n", "")
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, '')\n{script}"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.stdout == "False\n", done.stderr


def test_an_edit_of_a_package_that_is_linked_into_the_installed_ones_is_noticed(
    tmp_path: Path,
) -> None:
    """So some tools install in editable mode."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "project").mkdir()
    for name in ("linked", "copied"):
        place = tmp_path / ("project" if name == "linked" else "site-packages") / name
        place.mkdir()
        (place / "__init__.py").touch()
        (place / "part.py").touch()
    (tmp_path / "site-packages" / "linked").symlink_to(tmp_path / "project" / "linked")
    path = "sys.path.insert(0, 'site-packages')"
    imports = f"{path}\n    import linked.part, copied.part"
    assert is_current_after(tmp_path, "os.utime('site-packages/copied/part.py')", imports=imports)
    assert not is_current_after(tmp_path, "os.utime('project/linked/part.py')", imports=imports)


def test_an_edit_of_an_archive_is_noticed(tmp_path: Path) -> None:
    imports = "\n    ".join(
        [
            "with zipfile.ZipFile('code.zip', 'w') as archive: archive.writestr('zipped.py', '')",
            "sys.path.insert(0, 'code.zip')",
            "import zipped",
        ]
    )
    assert is_current_after(tmp_path, "", imports=imports)
    assert not is_current_after(tmp_path, "os.utime('code.zip', ns=(1, 1))", imports=imports)
