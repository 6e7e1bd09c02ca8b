"""A copy to the CPU that nobody waits for can be read before it has arrived: numbers of an earlier step, silently."""

import ast
from pathlib import Path

from folders import ROOT, each_folder

WAITED_FOR = {"integration/pytorch/src/stepstack/_schedule.py"}  # by an event


@each_folder
def test_no_copy_that_may_go_to_the_cpu_is_left_unwaited_for(folder):
    files = [path for path in sorted(folder.glob("src/**/*.py")) if str(path.relative_to(ROOT)) not in WAITED_FOR]
    assert [f"{path.name}:{line}" for path in files for line in unwaited(path)] == []


def test_an_unwaited_copy_is_seen(tmp_path):
    source = tmp_path / "source.py"
    source.write_text(
        "a.to(device, non_blocking=True)\n"
        "a.to(device, non_blocking=device.type != 'cpu')\n"
        "a.cpu(memory_format=f)\n"
        "pinned.copy_(a, non_blocking=True)\n"  # who has a pinned buffer knows what it is for
        "a.to('cpu', torch.float32, True)\n"
    )
    assert unwaited(source) == [1, 5]


def unwaited(path: Path) -> list[int]:
    """The lines of calls `x.to(…)` that say non_blocking wherever they go."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "to"
        and any(
            isinstance(value, ast.Constant) and value.value is True
            for value in (*node.args, *(word.value for word in node.keywords if word.arg == "non_blocking"))
        )
    ]
