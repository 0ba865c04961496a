from collections.abc import Callable

def receive(
    fd: int, received: Callable[[bytes, int, int], object], lost: Callable[[OSError | None], object], /
) -> object: ...
