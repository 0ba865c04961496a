import numpy as np
from numpy.typing import NDArray

def answers(data: bytes, places: NDArray[np.int64], /) -> tuple[bytes, bytes]: ...
