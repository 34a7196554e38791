"""The pages of the site; CI builds the site itself."""

import re

from scripts import build_docs


def test_each_public_name_is_on_one_page():
    build_docs.check_names()


def test_the_menu_has_every_page_about_names_and_every_notebook():
    menu = build_docs.CONFIG.read_text()
    pages = set(re.findall(r"\S+\.md$", menu, re.MULTILINE))
    notebooks = build_docs.ROOT.glob(build_docs.NOTEBOOKS)
    expected = {f"api/{page}.md" for page in build_docs.API}
    expected |= {f"scripts/examples/{file.stem}.md" for file in notebooks}
    assert expected <= pages
    documents = pages - expected
    assert [page for page in documents if not (build_docs.ROOT / page).is_file()] == []
