from typing_extensions import Buffer

def sweep(
    event: Buffer, start: Buffer, end: Buffer, cls: Buffer, events: int, over: Buffer, under: Buffer, /
) -> tuple[bytes, bytes]: ...
