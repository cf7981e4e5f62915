"""Says before a GPU is touched whether a checkpoint will serve, and what is wrong where.

``examine`` is the way in, and ``refuse`` makes one error of what it finds. ``folder`` opens what
somebody else wrote; ``names``, ``headers`` and ``config`` look at what needs no weight, and
``activations`` asks the plugin's own rule; ``values`` reads scales and samples, and ``nibbles``
compares columns. Each builds on the codec's checks and says more where serving with vLLM makes a
difference. ``catalogue`` is the list of all faults: what each does to the output, and whether the
plugin puts it right while loading.
"""

from .diagnosis import Diagnosis, Evidence, Examination, Level
from .examine import examine
from .refuse import refuse

__all__ = ["Diagnosis", "Evidence", "Examination", "Level", "examine", "refuse"]
