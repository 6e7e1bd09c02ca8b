import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # what the tests beside DeepSpeed share: stock.py
