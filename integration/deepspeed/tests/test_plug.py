"""What is refused, and that attributes come back: without an engine."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from stepstack_deepspeed import plug
from stepstack_deepspeed._plug_bf16 import Bf16
from stepstack_deepspeed._plug_overrides import Overrides
from stepstack_deepspeed._plug_stage0 import Fp16
from stepstack_deepspeed._plug_stage3 import Stage3
from stepstack_deepspeed._plug_stage12 import Stage12


class DeepSpeedEngine:
    """As much of one as is looked at before anything is done."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.has_moe_layers = self.zenflow = False
        self.torch_autocast_z0_gradscaler = None

    def is_deepcompile_active(self):
        return False


@pytest.fixture(autouse=True)
def deepspeed(monkeypatch):
    module = ModuleType("deepspeed")
    module.__version__ = "0.19.8+cpu"
    monkeypatch.setitem(sys.modules, "deepspeed", module)
    return module


def test_only_an_engine_is_plugged():
    with pytest.raises(TypeError, match=r"a DeepSpeedEngine, as deepspeed\.initialize returns it, not SimpleNamespace"):
        plug(SimpleNamespace())


@pytest.mark.parametrize("version", ["0.19.6", "0.20.0", "1.0", "0.19.8rc1", "main"])
def test_other_versions_are_refused(deepspeed, version):
    deepspeed.__version__ = version
    with pytest.raises(TypeError, match=f"DeepSpeed {version}; it handles 0.19.8 and later"):
        plug(DeepSpeedEngine(None))


@pytest.mark.parametrize("name", ["SuperOffloadOptimizer_Stage3", "ZenFlowZeroOptimizerParallel", "MiCS_Optimizer"])
def test_other_optimizers_are_refused_by_name(name):
    with pytest.raises(TypeError, match=f"does not handle {name}; it handles DeepSpeedZeroOptimizer_Stage3"):
        plug(DeepSpeedEngine(type(name, (), {})()))


@pytest.mark.parametrize("optimizer", [None, type("DummyOptim", (), {})()], ids=["None", "DummyOptim"])
def test_an_engine_without_an_optimizer_is_refused_with_what_to_do(optimizer):
    with pytest.raises(TypeError, match=r"no optimizer; give deepspeed\.initialize one"):
        plug(DeepSpeedEngine(optimizer))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"has_moe_layers": True}, "mixture of experts"),
        ({"zenflow": True}, "ZenFlow"),
        ({"is_deepcompile_active": lambda: True}, "DeepCompile"),
        ({"torch_autocast_z0_gradscaler": object()}, "torch_autocast in fp16"),
    ],
    ids=str,
)
def test_configurations_that_are_not_handled_are_refused_by_name(change, reason):
    engine = DeepSpeedEngine(None)
    vars(engine).update(change)
    with pytest.raises(ValueError, match=f"engines with {reason}"):
        plug(engine)


class Muon:
    """An optimizer by that name."""


@pytest.mark.parametrize(
    ("seam", "optimizer", "remedy"),
    [
        (Stage12, {"optimizer": Muon()}, '"type": "AdamW"'),
        (Stage3, {"use_muon": True}, '"type": "AdamW"'),
        (Bf16, {"_uses_muon": True}, '"type": "AdamW"'),
        (Fp16, {"mpu": object()}, "without mpu"),
        (Bf16, {"mpu": object()}, "without mpu"),
        (Stage12, {"model_parallel_group": object()}, "without mpu"),
        (Stage3, {"model_parallel_group": object()}, "without mpu"),
        (Stage3, {"swap_optimizer": True}, '"device": "cpu" for "nvme" in offload_optimizer'),
        (Stage3, {"params_in_nvme_and_cpu": True}, "in offload_optimizer and offload_param"),
    ],
)
def test_a_refusal_says_what_to_write_instead(seam, optimizer, remedy):
    plain = dict.fromkeys(("zenflow", "use_muon", "_uses_muon", "swap_optimizer", "params_in_nvme_and_cpu"), False)
    engine = DeepSpeedEngine(SimpleNamespace(**({"optimizer": None} | plain | optimizer)))
    assert remedy in seam.refusal(engine)


def test_a_method_that_takes_something_else_is_refused():
    class BF16_Optimizer:
        def scale_if_loss(self, value, more):
            raise AssertionError

    with pytest.raises(TypeError, match=r"BF16_Optimizer.scale_if_loss takes \('value', 'more'\), where plug knows"):
        plug(DeepSpeedEngine(BF16_Optimizer()))


def test_what_was_replaced_comes_back():
    class Owner:
        kind = "of the class"

        def __init__(self):
            self.own = "its own"

    owner = Owner()
    overrides = Overrides()
    assert overrides.replace(owner, "kind", "ours") == "of the class"
    assert overrides.replace(owner, "own", "ours") == "its own"
    assert overrides.replace(owner, "own", "ours too") == "ours"
    assert overrides.replace(owner, "new", "ours") is None
    assert vars(owner) == {"kind": "ours", "own": "ours too", "new": "ours"}
    overrides.restore()
    overrides.restore()
    assert vars(owner) == {"own": "its own"}
    assert owner.kind == "of the class"
