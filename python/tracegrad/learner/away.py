"""Checkpoints of a run whose folder is at an address: sent by every machine, sealed by the first rank, brought back.

Here is `Away`: which rank of a machine works in its folder, and in which order files go to the address and come from
there, so that a checkpoint is whole there or not there. It does nothing where the folder is one that all ranks see.
Called by the run and by `checkpoint`.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from tracegrad import outputs, shards
from tracegrad.learner.progress import MARK, marked, step_of
from tracegrad.learner.ranks import Ranks
from tracegrad.mirror import APART, Mirror
from tracegrad.shards import Written

_RESUME = "resume"


@dataclass
class Away:
    """The folder of a run as its ranks share it.

    Args:
        mirror: the folder, and its address where it has one.
        ranks: who shares it.
        leads: whether this rank makes and removes what is in the folder: one of each folder does.
    """

    mirror: Mirror
    ranks: Ranks
    leads: bool

    @classmethod
    def of(cls, out: str | os.PathLike[str] | Mirror, ranks: Ranks) -> "Away":
        """Every rank calls this with the same address; ranks of one machine work in one folder from then on.

        The marks of the checkpoints that are whole at the address are brought, so that they are known.

        Raises:
            ReadError: if the address cannot be asked.
        """
        mirror = Mirror.of(out)
        if not mirror.address:
            return cls(mirror, ranks, ranks.first)
        node = os.environ.get("GROUP_RANK")  # torchrun's number of the machine
        said = ranks.everybody((node, str(mirror.path)))
        path = next(Path(path) for other, path in said if other == node and Path(path).is_dir())
        leads = path == mirror.path
        ranks.everybody(None)  # nobody leaves a folder that another still looks for
        mirror.share(path)
        found = cls(mirror, ranks, leads)
        with ranks.together():
            if leads:
                found._bring_marks()
        return found

    def __str__(self) -> str:
        return str(self.mirror)

    @property
    def path(self) -> Path:
        """The folder of this machine."""
        return self.mirror.path

    def named(self, path: Path) -> str:
        """The address of a file or folder of the run; "" where the run is at none."""
        return self.mirror.named(path)

    def clear(self) -> None:
        """Removes at the address what a run that was killed there has left of a checkpoint."""
        if self.mirror.address and self.ranks.first:
            names = self._sent()
            whole = _marks(names)
            self.mirror.remove(name for name in names if _folder_of(name) not in whole)

    def bring(self, checkpoint: Path) -> None:
        """Brings what a run goes on from: the state of one checkpoint, and what the run has left beside checkpoints.

        Raises:
            ReadError: if it cannot be read, or is not as its mark says.
        """
        if not self.mirror.address:
            return
        with self.ranks.together():
            if self.leads:
                below = f"{APART}{checkpoint.name}/{_RESUME}/"
                files = marked(checkpoint / _RESUME)
                names = [name for name in self.mirror.names() if not name.startswith(APART)]
                self.mirror.bring([*names, *(below + name for name in files)])

    def send(self, staged: Path, name: str) -> dict[str, Written]:
        """Sends what this machine holds of a checkpoint that has no mark yet; every rank calls it.

        Args:
            staged: where it lies.
            name: of the checkpoint.

        Returns:
            On the first rank what other machines hold of `resume`, with sizes and checksums; elsewhere nothing.
        """
        if not self.mirror.address:
            return {}
        held: dict[str, Written] = {}
        with self.ranks.together():
            if self.leads:
                files = sorted(path for path in staged.rglob("*") if path.is_file())
                self.mirror.send_as({f"{APART}{name}/{path.relative_to(staged).as_posix()}": path for path in files})
                of = staged / _RESUME
                held = {p.relative_to(of).as_posix(): shards.measure(p) for p in files if of in p.parents}
        parts = self.ranks.gathered({} if self.ranks.first else held)
        return {name: written for part in parts for name, written in part.items()} if self.ranks.first else {}

    def seal(self, staged: Path, final: Path, keep: int) -> None:
        """Marks a checkpoint that was sent as whole, last of all, and lets go of those before the newest `keep`.

        Args:
            staged: where it lies on machines other than the first.
            final: its folder here, on the first machine whole already.
        """
        if not self.mirror.address:
            return
        with self.ranks.together():
            self.push()
        mark = self.ranks.shared((final / _RESUME / MARK).read_bytes() if self.ranks.first else b"")
        with self.ranks.together():
            if self.ranks.first:
                self.mirror.send([f"{APART}{final.name}/{_RESUME}/{MARK}"])
                self._let_go(keep)
            elif self.leads and staged.is_dir():
                outputs.write(staged / _RESUME / MARK, mark)
                staged.rename(final)
            for old in final.parent.glob("step-*") if self.leads else ():
                if old != final:
                    shutil.rmtree(old, ignore_errors=True)

    def push(self) -> None:
        """Sends what has changed beside the checkpoints; of the machine of this rank."""
        if self.leads:
            self.mirror.push()

    def _sent(self) -> list[str]:
        """The files of checkpoints at the address."""
        return [name for name in self.mirror.names() if name.startswith(APART)]

    def _bring_marks(self) -> None:
        self.mirror.bring(name for folder, name in _marks(self._sent()).items() if step_of(folder) >= 0)

    def _let_go(self, keep: int) -> None:
        names = self._sent()
        marks = _marks(names)
        for old in sorted(marks, key=step_of)[:-keep]:
            self.mirror.remove([marks[old]])  # first, as what has no mark is nothing
            self.mirror.remove(name for name in names if _folder_of(name) == old and name != marks[old])


def _folder_of(name: str) -> str:
    return name.removeprefix(APART).partition("/")[0]


def _marks(names: list[str]) -> dict[str, str]:
    """The marks among files of checkpoints, by the name of the checkpoint that each makes whole."""
    return {_folder_of(name): name for name in names if name.endswith(f"/{_RESUME}/{MARK}")}
