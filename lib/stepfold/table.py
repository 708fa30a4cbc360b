"""Format aligned text tables and human-readable numbers."""

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format rows under a header: text is left-aligned, numbers and sizes right-aligned.

    >>> print(table(("path", "bytes"), [("w", "1.0 MiB"), ("bias", "40 B")]))
    path    bytes
    ----  -------
    w     1.0 MiB
    bias     40 B
    """
    cells = [list(map(str, row)) for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    numeric = [
        bool(column) and all(cell == "" or cell[0].isdigit() for cell in column)
        for column in zip(*cells[1:], strict=True)
    ] or [False] * len(head)

    def line(row: Sequence[str]) -> str:
        aligned = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        return "  ".join(aligned).rstrip()

    rule = ["-" * width for width in widths]
    return "\n".join(line(row) for row in (cells[0], rule, *cells[1:]))


def size(count: float) -> str:
    """Format a number of bytes in binary units.

    >>> size(40), size(1 << 20), size(139.6e9)
    ('40 B', '1.00 MiB', '130 GiB')
    """
    return _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def amount(count: float) -> str:
    """Format a count in thousands, millions and so on.

    >>> amount(512), amount(70.6e9), amount(3.2e15)
    ('512', '70.6 G', '3.20 P')
    """
    return _scaled(count, 1000, ("", "k", "M", "G", "T", "P", "E", "Z")).rstrip()


def _scaled(count: float, base: int, units: Sequence[str]) -> str:
    power = 0
    while abs(count) >= base and power < len(units) - 1:
        count, power = count / base, power + 1
    is_integer = power == 0 and count == int(count)
    digits = 0 if is_integer or abs(count) >= 100 else 1 if abs(count) >= 10 else 2
    return f"{count:.{digits}f} {units[power]}"
