"""Importing a package does nothing but define its names."""

import contextlib
import importlib
import importlib.util
import io
import json
import multiprocessing
import os
import subprocess
import sys
import warnings
from textwrap import dedent

import pytest
import torch
import torch.distributed as dist

from folders import PUBLISHED, import_name

ENGINES = ("amp_C", "apex", "deepspeed", "megatron", "nemo", "transformer_engine")
REGISTERS_WITH = {"stepstack_nemo": "nemo"}  # so that a config can name it; where NeMo is installed, that imports NeMo
COMPILERS = ("torch._dynamo", "torch._inductor", "triton")
STATE = {
    "the environment": lambda: dict(os.environ),
    "the number of torch's threads": torch.get_num_threads,
    "the random state": lambda: torch.get_rng_state().tolist(),
    "the default dtype": torch.get_default_dtype,
    "the CUDA context": lambda: torch.cuda.is_initialized(),
    "the process group": dist.is_initialized,
    "the threads": lambda: len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else None,
}


@pytest.fixture(scope="module")
def effects():
    return effects_of_importing([import_name(folder) for folder in PUBLISHED])


@pytest.mark.parametrize("folder", PUBLISHED, ids=lambda folder: folder.name)
def test_importing_does_nothing_but_define_names(effects, folder):
    engine = REGISTERS_WITH.get(import_name(folder))
    if engine is not None and importlib.util.find_spec(engine) is not None:
        pytest.skip(f"{engine} is installed, and importing this folder's package registers with it")
    assert effects[import_name(folder)] == []


def test_every_effect_is_seen(tmp_path):
    (tmp_path / "quiet.py").write_text("from torch.distributed.tensor import DTensor\n")
    (tmp_path / "megatron.py").touch()
    noisy = """\
        import os, threading, time, warnings
        import megatron, torch, torch._dynamo, torch._inductor

        os.environ["NOISY"] = "1"
        torch.set_num_threads(3)
        torch.manual_seed(1)
        torch.set_default_dtype(torch.float64)
        torch.cuda.is_initialized = lambda: True
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
        print("look at me")
        warnings.warn("and at me")
        """
    (tmp_path / "noisy.py").write_text(dedent(noisy))
    effects = effects_of_importing(["quiet", "noisy"], tmp_path)
    assert effects["quiet"] == []
    assert effects["noisy"] == [
        "loads megatron",
        "loads torch._dynamo",
        "loads torch._inductor",
        *(f"changes {name}" for name in STATE if name != "the threads" or os.path.isdir("/proc/self/task")),
        "prints look at me",
        "warns and at me",
    ]


def effects_of_importing(modules, path=""):
    """What an interpreter that has done nothing but `import torch` notices of importing each of them, in words."""
    ended = subprocess.run(
        [sys.executable, __file__, *modules],
        env={**os.environ, "PYTHONPATH": str(path)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
    )
    return json.loads(ended.stdout)


def look(module):
    loaded, state = set(sys.modules), {name: value() for name, value in STATE.items()}
    printed = io.StringIO()
    with warnings.catch_warnings(record=True) as warned, contextlib.redirect_stdout(printed):
        warnings.simplefilter("always")
        importlib.import_module(module)
    return [
        *(f"loads {name}" for name in (*ENGINES, *COMPILERS) if name in sys.modules.keys() - loaded),
        *(f"changes {name}" for name, value in STATE.items() if value() != state[name]),
        *(f"prints {line}" for line in printed.getvalue().splitlines()),
        *(f"warns {warning.message}" for warning in warned),
    ]


def in_a_fork(function, argument):
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sender.send(function(argument)))
    process.start()
    sender.close()  # else a fork that dies would be waited for
    result = receiver.recv()
    process.join()
    return result


if __name__ == "__main__":  # as `effects_of_importing` runs this file; a fork per module, since torch takes seconds
    print(json.dumps({module: in_a_fork(look, module) for module in sys.argv[1:]}))
