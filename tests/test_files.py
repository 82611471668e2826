import os

import pytest

from fxrl.errors import ForeignFileError
from fxrl.files import opened, refuse_links, replacing, replacing_folder


@pytest.fixture
def outside(tmp_path):
    """A file that nothing may touch."""
    file = tmp_path / "outside.txt"
    file.write_text("mine")
    yield file
    assert file.read_text() == "mine"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def write(path):
    with replacing(path) as stream:
        stream.write(b"new")


@pytest.mark.parametrize("mode", ["rb", "ab", "xb"])
def test_a_link_is_not_followed(folder, outside, mode):
    (folder / "a").symlink_to(outside)
    with pytest.raises(ForeignFileError, match=r"a is a link to .*outside.txt: .*remove the link"):
        opened(folder / "a", mode)
    with pytest.raises(ForeignFileError):
        write(folder / "a")


def test_a_linked_folder_is_not_followed_but_the_named_one_may_be_a_link(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (folder / "inner").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ForeignFileError, match="inner is a link"):
        refuse_links(folder / "inner" / "a", folder)
    (tmp_path / "alias").symlink_to(folder)
    write(tmp_path / "alias" / "a")
    assert (folder / "a").read_bytes() == b"new"
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_pipe_is_refused_and_not_waited_for(folder):
    os.mkfifo(folder / "pipe")
    with pytest.raises(ForeignFileError, match="no plain file"):
        opened(folder / "pipe", "rb")


@pytest.mark.parametrize("planted", ["file", "link"])
def test_what_stands_under_the_name_of_a_work_file_is_removed_not_written(folder, outside, planted):
    work = folder / ".a.writing"
    if planted == "link":
        work.symlink_to(outside)
    else:
        work.write_text("left over")
    write(folder / "a")
    assert [p.name for p in folder.iterdir()] == ["a"]


def test_a_failed_write_leaves_the_former_file_and_nothing_else(folder):
    write(folder / "a")
    with pytest.raises(TypeError), replacing(folder / "a") as stream:
        stream.writelines([b"half", None])
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == {"a": b"new"}


def test_a_folder_is_replaced_as_a_whole(folder, outside):
    (folder / "final").mkdir()
    (folder / "final" / "weights").symlink_to(outside)
    (folder / ".final.writing").symlink_to(outside.parent)
    with replacing_folder(folder / "final") as work:
        (work / "weights").write_text("new")
    assert [p.name for p in folder.iterdir()] == ["final"]
    assert (folder / "final" / "weights").read_text() == "new"
