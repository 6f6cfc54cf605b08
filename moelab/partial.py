"""The folder ``OUT.partial``, in which a command works until all of ``OUT`` is on disk.

The first file in it is a journal. It names the command, what the files are made from, and every
file that the command writes there. Those files and the journal are removed, and no others.
"""

import json
import os
from pathlib import Path


def begin(out: Path, journal: str, files: list[str], made_from: str | None = None) -> Path:
    """Make ``OUT.partial``, or take over the one that a killed run of the same command left.

    Its ``files`` are kept if they were made from the same ``made_from`` (None: removed). A folder
    that holds anything of others is an error, and nothing is changed.
    """
    partial = out.with_name(out.name + ".partial")
    earlier = _earlier(partial, journal)
    keep = files if made_from is not None and earlier.get("made_from") == made_from else []
    partial.mkdir(parents=True, exist_ok=True)
    for name in set(earlier["files"]) - set(keep):
        (partial / name).unlink(missing_ok=True)
    new = partial / f"{journal}.writing"
    new.write_text(json.dumps({"made_from": made_from, "files": sorted(files)}))
    os.replace(new, partial / journal)
    (partial / f"{journal}.done").unlink(missing_ok=True)
    return partial


def finish(partial: Path, out: Path, journal: str) -> None:
    """Give the folder its final name and remove the journal, in this order.

    A run that is killed in between leaves a folder that the command knows as its own.
    """
    os.replace(partial / journal, partial / f"{journal}.done")
    os.rename(partial, out)
    (out / f"{journal}.done").unlink()


def clear(partial: Path, journal: str, files: list[str]) -> None:
    """Remove a command's files and, if nothing else is in it, the folder."""
    for name in (*files, f"{journal}.writing", f"{journal}.done", journal):
        (partial / name).unlink(missing_ok=True)
    if partial.is_dir() and not any(partial.iterdir()):
        partial.rmdir()


def _earlier(partial, journal):
    """Read the journal of a killed run, and refuse a folder that holds anything of others."""
    command = f"moelab {journal.removesuffix('.json')}"
    remedy = "Remove it, or move it elsewhere, or name another folder to make."
    if partial.is_symlink() or (partial.exists() and not partial.is_dir()):
        raise FileExistsError(
            f"{partial}: expected nothing or a folder that '{command}' left, "
            f"got a {'link' if partial.is_symlink() else 'file'}. {remedy}"
        )
    found = {p.name for p in partial.iterdir()} if partial.is_dir() else set()
    found.discard(f"{journal}.writing")
    if not found:
        return {"files": []}
    done = f"{journal}.done"
    try:
        earlier = json.loads((partial / (done if done in found else journal)).read_text())
        known = {journal, done, *earlier["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        raise FileExistsError(
            f"{partial}: expected a folder that '{command}' left, with its {journal}, "
            f"found none of its own. {remedy}"
        ) from None

    def is_own(name):
        file = partial / name
        return name in known and file.is_file() and not file.is_symlink()

    others = sorted(name for name in found if not is_own(name))
    if others:
        raise FileExistsError(
            f"{partial}: '{command}' left this folder, but did not write {', '.join(others[:3])}"
            f"{' and more' if len(others) > 3 else ''} in it. Move what is yours elsewhere and "
            "run the command again, or name another folder to make."
        )
    return {**earlier, "files": sorted(found - {journal, done})}
