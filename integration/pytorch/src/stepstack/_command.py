"""The command `stepstack`: what is in a checkpoint, whether it is whole, and a file of it for plain PyTorch."""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from stepstack import _folder
from stepstack._export import SUFFIXES, export
from stepstack._folder import Marker
from stepstack._storage import check_readable, read_metadata
from stepstack._summary import Summary, size_in_words


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status: 0, or 1 with a sentence on stderr (argparse ends a wrong call with 2)."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except (ImportError, OSError, RuntimeError, ValueError) as error:  # RuntimeError is torch's for a full disk, too
        print(f"stepstack: {error}", file=sys.stderr)
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="stepstack", description="Tools around stepstack's training runs.")
    checkpoint = parser.add_subparsers(required=True).add_parser(
        "checkpoint", help="look at checkpoints", description="Look at checkpoints. One process does it, without a GPU."
    )
    actions = checkpoint.add_subparsers(required=True)
    folder = argparse.ArgumentParser(add_help=False)
    folder.add_argument("dir", type=Path, metavar="DIR", help="a folder of checkpoints, or one of them")

    show = actions.add_parser("show", parents=[folder], help="list the parameters and their states")
    show.add_argument("--step", type=int, metavar="N", help="which one (the newest)")
    show.set_defaults(run=_show)

    verify = actions.add_parser("verify", parents=[folder], help="read every byte and compare checksums")
    verify.add_argument("--step", type=int, metavar="N", help="which one (all of them)")
    verify.set_defaults(run=_verify)

    to_file = actions.add_parser("export", parents=[folder], help="write one file for plain PyTorch")
    to_file.add_argument("file", type=_exportable, metavar="FILE", help=f"what to write: {' or '.join(SUFFIXES)}")
    to_file.add_argument("--step", type=int, metavar="N", help="which one (the newest)")
    to_file.add_argument("--optimizer", action="store_true", help="with the states of the optimizer")
    to_file.set_defaults(run=_export)
    return parser


def _exportable(text: str) -> Path:
    if Path(text).suffix not in SUFFIXES:
        raise argparse.ArgumentTypeError(f"must end in {' or '.join(SUFFIXES)}, not {text!r}")
    return Path(text)


def _show(options: argparse.Namespace) -> int:
    if steps := _folder.steps_in(options.dir):
        print(f"{options.dir} has checkpoints of step {', '.join(map(str, steps))}")
    summary = Summary(_folder.find(options.dir, options.step))
    print(f"{summary.headline}\n")
    print(_table(summary.rows()))
    print(f"\n{summary.options}")
    return 0


def _verify(options: argparse.Namespace) -> int:
    found = [_folder.find(options.dir, options.step)]
    if options.step is None and found[0] != options.dir:
        found = list(_folder.steps_in(options.dir).values())
    damaged = 0
    for checkpoint in found:
        try:
            marker = _folder.verify(checkpoint)
            check_readable(checkpoint, read_metadata(checkpoint, marker))
            print(f"{checkpoint}: {_size(marker)}, all as they were written")
        except (OSError, ValueError) as error:
            print(f"stepstack: {error}", file=sys.stderr)
            damaged += 1
    for left in sorted(options.dir.glob("step_*.partial")):
        print(f"{left}: a save that did not end, or has not yet; it is not a checkpoint")
    return 1 if damaged else 0


def _export(options: argparse.Namespace) -> int:
    checkpoint = _folder.find(options.dir, options.step)
    tensors = export(checkpoint, options.file, optimizer=options.optimizer)
    print(f"{options.file}: {tensors} tensors, {size_in_words(options.file.stat().st_size)}, of {checkpoint}")
    return 0


def _size(marker: Marker) -> str:
    return f"{len(marker.files)} files, {size_in_words(sum(file.size for file in marker.files.values()))}"


def _table(rows: Iterable[Sequence[str]]) -> str:
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
