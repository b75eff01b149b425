"""Accuracy of a demand forecast."""

import msgspec


class Score(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The forecast for one hour compared with actual demand, in minutes and GPU minutes."""

    hour: int  # since 1970
    foreseen_count: int  # the rise in GPUs that the forecast allowed for
    minutes_count: int  # minutes that were compared
    kept_count: int  # minutes whose rise was at most that
    missed_gpu_minutes: int  # of rises beyond the forecast
    unused_gpu_minutes: int  # of the forecast beyond rises
    rise_gpu_minutes: int  # of all rises: missed without any forecast
