"""The pages that are tested, typed into shells of their own: as many at once as there are processors."""

from __future__ import annotations

import os
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import doc_workspace
import pytest
from doc_blocks import Command, runnable

sys.path.append(str(Path(__file__).parents[1] / "jobs"))
from ports import held_port


@pytest.fixture(scope="session")
def typed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """For a page that a selected test asks for: what each of its commands gave."""
    asked = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    pages = list(dict.fromkeys(params["page"] for params in asked if "page" in params))

    # Made before the threads begin: pytest's first folder must not be asked for by two of them at once.
    folders = {page: tmp_path_factory.mktemp(page.stem) for page in pages}

    def type_page(page: Path) -> list[tuple[int, str]]:
        folder = doc_workspace.make(folders[page])
        commands: list[Command] = runnable(page)
        with held_port() as port:
            return doc_workspace.typed(commands, folder, doc_workspace.environment(folder, port))

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        begun: dict[Path, Future[list[tuple[int, str]]]] = {
            page: pool.submit(type_page, page) for page in pages
        }
    return {page: future.result() for page, future in begun.items()}
