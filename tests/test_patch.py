"""The import line goes into a checkout, all of it or nothing, and comes out again."""

from pathlib import Path

import pytest

from megatron_resilience.control.cli import main
from megatron_resilience.files import folder
from megatron_resilience.patch import diffs_for, parse, patch

# Shaped like Megatron's, not taken from it.
SCRIPT = '# Somebody\'s notice.\n\n"""What it does."""\n\n# A remark.\nimport time\n\nimport torch\nfrom megatron import core\n'


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return make(tmp_path / "Megatron-LM", "0", "19", "1")


def make(path: Path, *release: str) -> Path:
    (path / "megatron" / "core").mkdir(parents=True)
    text = "".join(f"{name} = {number}\n" for name, number in zip(("MAJOR", "MINOR", "PATCH"), release, strict=True))
    (path / "megatron" / "core" / "package_info.py").write_text(text)
    (path / "pretrain_gpt.py").write_text(SCRIPT)
    return path


def test_there_and_back(checkout, capsys):
    assert main(["patch", str(checkout)]) == 0
    text = (checkout / "pretrain_gpt.py").read_text()
    assert text.splitlines()[4].startswith("import megatron_resilience.autoload")
    assert "Megatron-LM 0.19.1" in capsys.readouterr().out
    assert main(["patch", str(checkout)]) == 0
    assert "is patched already" in capsys.readouterr().out
    assert (checkout / "pretrain_gpt.py").read_text() == text
    assert main(["patch", "--revert", str(checkout)]) == 0
    assert (checkout / "pretrain_gpt.py").read_text() == SCRIPT
    assert "is not patched" in patch(checkout, revert=True)[1]


def test_a_checkout_inside_another_repository(checkout):
    """`git apply` would leave such files alone and say nothing."""
    (checkout.parent / ".git").mkdir()
    assert "patched" in patch(checkout, revert=False)[1]
    assert "autoload" in (checkout / "pretrain_gpt.py").read_text()


def test_taken_out_after_edits_above_it(checkout):
    patch(checkout, revert=False)
    path = checkout / "pretrain_gpt.py"
    path.write_text("# mine\n" + path.read_text())
    patch(checkout, revert=True)
    assert path.read_text() == "# mine\n" + SCRIPT


@pytest.mark.parametrize(
    "text", ['"""A\nlong\nlong\nlong\ndocstring."""\nimport torch\n', "import torch\n\n\n\nimport time\n"]
)
def test_an_edited_script_is_left_alone(checkout, capsys, text):
    (checkout / "pretrain_gpt.py").write_text(text)
    assert main(["patch", str(checkout)]) == 2
    assert "edited" in capsys.readouterr().err
    assert (checkout / "pretrain_gpt.py").read_text() == text


def test_other_releases_and_other_folders_are_refused(tmp_path, capsys):
    assert main(["patch", str(make(tmp_path / "old", "0", "12", "3"))]) == 2
    assert "found Megatron-LM 0.12.3; there are patches for core_v0.19.0" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["patch", str(tmp_path / "empty")]) == 2
    assert "package_info.py is missing" in capsys.readouterr().err


def test_every_patch_is_read_and_has_no_context():
    for path in folder("patches").glob("*/*.diff"):
        assert parse(path.read_text()).hunks
        assert diffs_for(path.parent.name.removeprefix("core_v"))


def test_replaced_lines_are_put_back():
    diff = parse("--- a/x\n+++ b/x\n@@ -2 +2,2 @@\n-b\n+B\n+BB\n@@ -4 +5 @@\n-d\n+D\n")
    patched = diff.apply(["a", "b", "c", "d"], "x")
    assert patched == ["a", "B", "BB", "c", "D"]
    assert diff.reverted().apply(patched, "x") == ["a", "b", "c", "d"]
