"""Jobs that shrink and grow, and outlive the loss of ranks: a model and its optimizer move to other ranks in memory."""

from __future__ import annotations

from .api import regroup
from .joining import has_begun, start
from .keeper import kept_bytes
from .survive import Step, Survived, survive
from .transfer import Moved

__all__ = ["Moved", "Step", "Survived", "has_begun", "kept_bytes", "regroup", "start", "survive"]
