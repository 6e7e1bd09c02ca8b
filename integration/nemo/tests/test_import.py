"""Importing it registers with NeMo where NeMo is, and needs no engine where it is not. Registries stand in here."""

import json
import subprocess
import sys

STAND_INS = {
    "nemo/core/optim/optimizers.py": "AVAILABLE_OPTIMIZERS = {'distributed_fused_adam': 'of Apex'}\n",
    "nemo/core/config/optimizers.py": "AVAILABLE_OPTIMIZER_PARAMS = {}\n",
    "lightning/pytorch/strategies.py": "class StrategyRegistry(dict):\n"
    "    def register(self, name, cls, description):\n"
    "        self[name] = cls\n"
    "StrategyRegistry = StrategyRegistry()\n"
    "class DDPStrategy: pass\n",
}
PROGRAM = """
import json
import stepstack_nemo
from nemo.core.config.optimizers import AVAILABLE_OPTIMIZER_PARAMS as params
from nemo.core.optim.optimizers import AVAILABLE_OPTIMIZERS as optimizers
from lightning.pytorch.strategies import StrategyRegistry as strategies
def look():
    return [{n: getattr(o, "__name__", o) for n, o in optimizers.items()}, sorted(params), sorted(strategies)]
looks = [look()]
stepstack_nemo.register()
looks.append(look())
stepstack_nemo.take_over()
looks.append(look())
print(json.dumps(looks))
"""
WITHOUT = """
import importlib.util
importlib.util.find_spec = lambda name: None
import stepstack_nemo
for call in (stepstack_nemo.register, stepstack_nemo.take_over):
    try:
        call()
    except ImportError as error:
        print(error)
"""


def run(program, folder):
    """What a fresh interpreter prints, with the modules of a folder."""
    command = [sys.executable, "-W", "error", "-c", program]
    ended = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    return ended.stdout


def test_importing_registers_under_every_name_that_nemo_looks_for(tmp_path):
    for path, source in STAND_INS.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    at_first, again, taken_over = json.loads(run(PROGRAM, tmp_path))
    assert at_first == again
    optimizers, params, strategies = at_first
    assert optimizers == {
        "distributed_fused_adam": "of Apex",
        "stepstack_distributed_fused_adam": "DistributedFusedAdam",
    }
    assert params == ["DistributedFusedAdam_params", "stepstack_distributed_fused_adam_params"]
    assert strategies == ["stepstack"]
    assert taken_over[0]["distributed_fused_adam"] == "DistributedFusedAdam"
    assert taken_over[0]["fused_adam"] == "FusedAdam"
    assert {"distributed_fused_adam_params", "fused_adam_params"} <= set(taken_over[1])


def test_without_nemo_it_is_imported_and_says_what_is_missing(tmp_path):
    (tmp_path / "nemo.py").write_text("raise ImportError('as if it were not here')")
    assert run(WITHOUT, tmp_path).count("NeMo can't be imported") == 2
