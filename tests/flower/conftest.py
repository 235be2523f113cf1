"""The helpers of tests/ and of this folder are importable here."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [path for path in (str(HERE), str(HERE.parent)) if path not in sys.path]
