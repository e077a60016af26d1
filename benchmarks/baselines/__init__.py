"""The baselines that `eprt bench dispatch` and `eprt bench experts` measure in the same run as eprt.

`eprt.bench.baselines` imports this folder, so it stays out of the wheel. A baseline is a competing library, or the
library under one of eprt's backends called directly.
"""

from .direct import check_direct, direct_call
from .experts import CHECKED_TOKENS, EXPERTS, check_experts
from .transports import TRANSPORTS

__all__ = ["CHECKED_TOKENS", "EXPERTS", "TRANSPORTS", "check_direct", "check_experts", "direct_call"]
