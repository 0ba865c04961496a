from gapmeter.analysis.arrays import AnyArray, Ints

def sweep(event: Ints, start: Ints, end: Ints, cls: Ints, marks: AnyArray, hidden: Ints, /) -> bytearray: ...
def meet(start: Ints, end: Ints, stretch_start: Ints, stretch_end: Ints, between: bool, /) -> bytearray: ...
def kept(
    event: Ints, start: Ints, end: Ints, rows: Ints, counted: Ints, stretch_start: Ints, stretch_end: Ints,
    reason: AnyArray, kinds: AnyArray, by_reason: Ints, ns: Ints, /,
) -> None: ...  # fmt: skip
