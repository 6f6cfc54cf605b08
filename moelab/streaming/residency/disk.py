"""``source="disk"``: an expert is read when it is needed; with CUDA the GPU copies it."""

from ..cuda import Mailbox
from ..ranks import Ranks
from ..reading.reader import Reader
from ..reading.uploading import UploadingReader
from .layer import LayerSlots


def open_reader(readers: int, direct: bool, mailbox: Mailbox | None, ranks: Ranks | None) -> Reader:
    """Make the reader of all experts, which uploads if a GPU copies (``mailbox``)."""
    return UploadingReader(mailbox, readers, direct) if mailbox else Reader(readers, direct)


def hold(layers: list[LayerSlots], reader: Reader) -> None:
    """Read nothing while the model is loaded."""
