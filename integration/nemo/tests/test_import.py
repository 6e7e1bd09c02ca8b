"""Importing it registers with NeMo where NeMo is, and needs no engine where it is not. Registries stand in here."""

import json
import subprocess
import sys

import pytest

STAND_INS = {
    "nemo/core/optim/optimizers.py": "AVAILABLE_OPTIMIZERS = {'distributed_fused_adam': 'of Apex'}\n",
    "nemo/core/config/optimizers.py": "AVAILABLE_OPTIMIZER_PARAMS = {}\n",
    "lightning/pytorch/strategies.py": "class StrategyRegistry(dict):\n"
    "    def register(self, name, cls, description):\n"
    "        self[name] = cls\n"
    "StrategyRegistry = StrategyRegistry()\n"
    "class DDPStrategy: pass\n",
}
LOOK = """
import json, sys
from nemo.core.config.optimizers import AVAILABLE_OPTIMIZER_PARAMS as params
from nemo.core.optim.optimizers import AVAILABLE_OPTIMIZERS as optimizers
from lightning.pytorch.strategies import StrategyRegistry as strategies
print(json.dumps([{n: getattr(o, "__name__", o) for n, o in optimizers.items()}, sorted(params), sorted(strategies)]))
"""


@pytest.fixture
def beside_nemo(tmp_path):
    for path, source in STAND_INS.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)

    def run(program):
        command = [sys.executable, "-W", "error", "-c", program + LOOK]
        ended = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
        return json.loads(ended.stdout)

    return run


def test_importing_registers_under_every_name_that_nemo_looks_for(beside_nemo):
    optimizers, params, strategies = beside_nemo("import stepstack_nemo; stepstack_nemo.register()")
    assert optimizers == {
        "distributed_fused_adam": "of Apex",
        "stepstack_distributed_fused_adam": "DistributedFusedAdam",
    }
    assert params == ["DistributedFusedAdam_params", "stepstack_distributed_fused_adam_params"]
    assert strategies == ["stepstack"]


def test_take_over_claims_apexs_name(beside_nemo):
    optimizers, params, _ = beside_nemo("import stepstack_nemo; stepstack_nemo.take_over()")
    assert optimizers["distributed_fused_adam"] == "DistributedFusedAdam"
    assert "distributed_fused_adam_params" in params


@pytest.mark.parametrize("call", ["register", "take_over"])
def test_without_nemo_it_is_imported_and_says_what_is_missing(tmp_path, call):
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
sys.modules["lightning"] = None  # as if it were not installed
import importlib.util
importlib.util.find_spec = lambda name: None
import stepstack_nemo
try:
    stepstack_nemo.{call}()
except ImportError as error:
    print(error)
"""
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], stdout=subprocess.PIPE, text=True, timeout=120, check=True
    )
    assert "NeMo can't be imported" in ended.stdout
