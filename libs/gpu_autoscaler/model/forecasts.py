"""How right a forecast of demand was."""

import msgspec


class Score(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The forecast for one hour beside what came, in minutes and GPU minutes."""

    hour: int  # since 1970
    foreseen_count: int  # the rise in GPUs that the forecast reckoned with
    minutes_count: int
    kept_count: int  # minutes whose rise was no higher
    missed_gpu_minutes: int  # of rises beyond the forecast
    unused_gpu_minutes: int  # of the forecast beyond rises
    rise_gpu_minutes: int  # of all rises: what no forecast at all would have missed
