"""Callbacks of a run: progress, logs, pictures, an early end."""

from __future__ import annotations

from .base import Callback
from .early_stop import EarlyStop
from .loss_plot import LossPlot
from .metrics_log import MetricsLog, read_metrics
from .progress import ProgressBar
from .sample_text import SampleText
from .summary import Summary

__all__ = ["Callback", "EarlyStop", "LossPlot", "MetricsLog", "ProgressBar", "SampleText", "Summary", "read_metrics"]
