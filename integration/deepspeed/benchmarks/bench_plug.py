"""The race of bench_engine.py, with DeepSpeed's engine as it is, the same one plugged, and ours.

    python bench_plug.py [--dtype bf16] [--layers 8] [--width 512] [--rounds 5] [--stages 2 3]

Needs DeepSpeed, and the first time builds its Adam for the CPU, which takes minutes.
"""

import os

import bench_engine
from deepspeed.ops.op_builder import CPUAdamBuilder

from stepstack_deepspeed import plug


def plugged(model, config):
    return plug(bench_engine.stock(model, config)).engine


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    CPUAdamBuilder().load(verbose=False)  # before there are ranks, which would wait for each other
    bench_engine.ENGINES = {"stepstack": bench_engine.ours, "plugged": plugged, "DeepSpeed": bench_engine.stock}
    bench_engine.main()
