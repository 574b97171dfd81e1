"""Moved to etserve.plan (floor 2): import from there."""

from etserve.plan import ModelRunnerOutput, Sampled, ScheduledSequence, SchedulerOutput

__all__ = ["ModelRunnerOutput", "Sampled", "ScheduledSequence", "SchedulerOutput"]
