"""What is checked of accepted paths that come as tables."""

from collections.abc import Sequence

from treewy.errors import ShapeError
from treewy.packed import PathTables


def check_path_shape(path: PathTables, num_seqs: int) -> None:
    """Check that a path table is one of so many sequences.

    Raises:
        ShapeError: it is not.
    """
    if path.rows.ndim != 2 or path.rows.shape[0] != num_seqs or tuple(path.lengths.shape) != (num_seqs,):
        raise ShapeError(
            f"A path must be [B, P] rows and [B] lengths for {num_seqs} sequences; got {tuple(path.rows.shape)} and "
            f"{tuple(path.lengths.shape)}. Pass the paths of the same sequences, in the same order."
        )


def check_path_rows(path: PathTables, spans: Sequence[tuple[int, int] | None]) -> None:
    """Check, on the host, that paths are as long as tables have places for and hold rows that there are.

    Args:
        path: The paths.
        spans: First row that a sequence may accept, and the one past its last; None where its path is not to be read.

    Raises:
        ShapeError: a length or a row is out of range.
    """
    places = path.rows.shape[1]
    for seq, (span, length, rows) in enumerate(zip(spans, path.lengths.tolist(), path.rows.tolist(), strict=True)):
        if span is None:
            continue
        if not 0 <= length <= places:
            raise ShapeError(
                f"A path must have between 0 and {places} rows in a table of so many places; sequence {seq} has a length "
                f"of {length}. Cut it, or make a wider table."
            )
        wrong = [row for row in rows[:length] if not span[0] <= row < span[1]]
        if wrong:
            raise ShapeError(
                f"Rows of a path must lie in {span[0]}..{span[1] - 1}; sequence {seq} has {wrong[0]} among its {length}. Pass "
                "packed rows of the step that is committed."
            )
