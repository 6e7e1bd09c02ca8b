import sys
from pathlib import Path

import torch._dynamo  # noqa: F401  # an optimizer loads it, for most of a second: once here, not in each forked rank

sys.path.insert(0, str(Path(__file__).parents[3] / "docs" / "examples"))  # the demo is tested here
