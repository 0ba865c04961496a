"""Whose each nanosecond was that a request or a token waited.

``read`` joins what the probes wrote to the client's requests: a ``trace``, with what kept its threads (``core_use``,
``who_ran``). For the ends of ledgers, ``Events``, ``index`` and ``steps`` find its rows, ``intervals`` makes of them
what went on, of a class each (``classes``), ``critical_path`` gives each nanosecond to one class, and ``shares`` to a
stage. ``ledger`` does this a block at a time (``portions``), and once for all where requests only decode
(``decoding``). ``tail``, ``explore`` and ``upgrade`` read the tables. One request in numbers: docs/how-it-measures.md.

Arrays that point at something are named for it: ``request`` (a row of the client's table, or a further choice behind
them), ``event`` (a row of ``Events``), ``seq`` and, in tables, ``step`` (a step's number through all engines),
``position`` (its place in ``Steps``), ``place`` (an engine's among the engines). MISSING points at nothing.
"""
