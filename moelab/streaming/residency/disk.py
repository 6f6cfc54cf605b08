"""``source="disk"``: an expert is read when it is needed; with CUDA the GPU copies it."""

from ..gpu.cuda import Mailbox, UploadingReader
from ..ranks import Ranks
from ..reading.reader import Reader
from .layer import LayerSlots


def open_reader(readers: int, mailbox: Mailbox | None, ranks: Ranks | None) -> Reader:
    """The reader of all experts.

    Args:
        readers (int): Reads in flight at once.
        mailbox (Mailbox or None): Starts a GPU's copies.
        ranks (Ranks or None): Those that divide the experts.
    """
    return UploadingReader(mailbox, readers) if mailbox else Reader(readers)


def hold(layers: list[LayerSlots], reader: Reader) -> None:
    """While the model is loaded nothing is read."""
