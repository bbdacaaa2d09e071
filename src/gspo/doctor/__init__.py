"""What can be known about a run before hours are spent on it, each finding with what was measured and what to do."""

from gspo.doctor.examine import examine
from gspo.doctor.finding import Finding

__all__ = ["Finding", "examine"]
