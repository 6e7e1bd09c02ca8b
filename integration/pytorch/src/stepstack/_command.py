"""The command `stepstack`: what is in a checkpoint, whether it is whole, and a file of it for plain PyTorch."""

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

from stepstack import _folder
from stepstack._export import SUFFIXES, export
from stepstack._folder import Marker
from stepstack._storage import check_readable, read_metadata
from stepstack._summary import Summary, size_in_words


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status: 0, or 1 with a sentence on stderr (argparse ends a wrong call with 2)."""
    for stream in (sys.stdout, sys.stderr):
        _print_what_can_be_printed(stream)
    try:
        options = _parser().parse_args(arguments)
        status: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python says so again when it ends
        return 0
    except (ImportError, OSError, RuntimeError, ValueError) as error:  # RuntimeError is torch's for a full disk, too
        print(f"stepstack: {error}", file=sys.stderr)
        return 1
    return status


def _print_what_can_be_printed(stream: TextIO) -> None:
    """On a terminal without UTF-8, and of paths that are not UTF-8, the rest as escapes."""
    if reconfigure := getattr(stream, "reconfigure", None):
        reconfigure(errors="backslashreplace")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="stepstack", description="Tools around stepstack's training runs.")
    parser.add_argument("--version", action="version", version=f"stepstack {version('stepstack')}")
    checkpoint = parser.add_subparsers(required=True).add_parser(
        "checkpoint", help="look at checkpoints", description="Look at checkpoints. One process does it, without a GPU."
    )
    actions = checkpoint.add_subparsers(required=True)
    folder = argparse.ArgumentParser(add_help=False)
    folder.add_argument("dir", type=Path, metavar="DIR", help="a folder of checkpoints, or one of them")
    folder.add_argument("--json", action="store_true", help="print one JSON object instead of text")

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
    summary = Summary(_folder.find(options.dir, options.step))
    steps = list(_folder.steps_in(options.dir))
    if options.json:
        _print_json({**summary.facts(), "steps": steps})
        return 0
    if steps:
        print(f"{options.dir} has checkpoints of step {', '.join(map(str, steps))}")
    print(f"{summary.headline}\n")
    print(_table(summary.rows()))
    print(f"\n{summary.options}")
    return 0


def _verify(options: argparse.Namespace) -> int:
    found = [_folder.find(options.dir, options.step)]
    if options.step is None and found[0] != options.dir:
        found = list(_folder.steps_in(options.dir).values())
    damaged: dict[str, str] = {}
    for checkpoint in found:
        try:
            marker = _folder.verify(checkpoint)
            check_readable(checkpoint, read_metadata(checkpoint, marker))
        except (OSError, ValueError) as error:
            damaged[str(checkpoint)] = str(error)
            print(f"stepstack: {error}", file=sys.stderr)
        else:
            if not options.json:
                print(f"{checkpoint}: {_size(marker)}, all as they were written")
    left = sorted(map(str, options.dir.glob("step_*.partial")))
    if options.json:
        whole = [str(checkpoint) for checkpoint in found if str(checkpoint) not in damaged]
        _print_json({"whole": whole, "damaged": damaged, "partial": left})
        return 1 if damaged else 0
    for path in left:
        print(f"{path}: a save that did not end, or has not yet; it is not a checkpoint")
    return 1 if damaged else 0


def _export(options: argparse.Namespace) -> int:
    checkpoint = _folder.find(options.dir, options.step)
    tensors = export(checkpoint, options.file, optimizer=options.optimizer)
    size = options.file.stat().st_size
    if options.json:
        _print_json({"file": str(options.file), "tensors": tensors, "bytes": size, "checkpoint": str(checkpoint)})
    else:
        print(f"{options.file}: {tensors} tensors, {size_in_words(size)}, of {checkpoint}")
    return 0


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=1))  # in ASCII, whatever there is


def _size(marker: Marker) -> str:
    return f"{len(marker.files)} files, {size_in_words(sum(file.size for file in marker.files.values()))}"


def _table(rows: Iterable[Sequence[str]]) -> str:
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
