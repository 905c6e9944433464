"""Tags and notes on the web page, in a real Chromium."""

import pytest
from browser import Visit, chromium, expect, needs_chromium, visit
from free_ports import free_port_pair
from made_experiment import made_experiment, served_view, write

from nni_manager.domain.remarks import Remarks
from nni_manager.store.registry import Registry
from nni_manager.store.rows import remarks_row

pytestmark = [pytest.mark.any_machine, needs_chromium]
HOSTILE = "<img src=x onerror=window.hacked=1>\n\u202esecond line"
TRAIN = "import nni_sdk as nni\nnni.get_next_parameter()\nnni.report_final_result(1)\n"


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


@pytest.fixture(autouse=True)
def state_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_tags_and_notes_from_one_browser_appear_in_another_browser(browser, a_real_experiment):
    experiment = a_real_experiment(TRAIN, trialConcurrency=1, maxTrialNum=2)
    Registry.of_user().add(experiment.folder)
    port = free_port_pair()
    experiment.start(port)
    experiment.wait_for_status("DONE")
    first, second = (trial["id"] for trial in experiment.get("/trials"))

    def link():
        return f"http://127.0.0.1:{port}/enter#{experiment.ask('POST', '/entrance').json()['code']}"

    with visit(browser, link()) as here, visit(browser, link()) as there:
        for person in (here, there):
            person.see("nav-trials").click()
            person.see(f"expand-{first}").click()
        # The manager refuses the first tag, which contains a space. The second tag is valid.
        here.see("new-tag").fill("two words")
        here.see("add-tag").click()
        expect(here.see("toast")).to_contain_text("cannot use tag 'two words'")
        expect(here.see("new-tag")).to_have_value("two words")
        here.see("new-tag").fill("keep")
        here.page.keyboard.press("Enter")
        for person in (here, there):
            expect(person.see("tags")).to_have_text("keep×")
            expect(person.see(f"row-{first}")).to_contain_text("keep")
        # Both pages edit the note at the same time: `here` saves its text while `there` has an unsaved text.
        there.see("edit-note").click()
        there.see("note-field").fill("theirs")
        here.see("edit-note").click()
        here.see("note-field").fill(HOSTILE)
        here.see("save-note").click()
        expect(here.see("note")).to_have_text(HOSTILE.replace("\u202e", ""))
        expect(there.see("note-field")).to_have_value("theirs")
        assert experiment.get(f"/trials/{first}")["note"] == HOSTILE
        expect(there.see("remarks")).to_contain_text("The note has been changed elsewhere meanwhile")
        there.screenshot("tags-edited")
        assert there.faults_for_assistive_technology() == []
        there.see("save-note").click()
        for person in (here, there):
            expect(person.see("note")).to_have_text("theirs")
        # Each change affects only the second line of the note. The page of the other visitor must show it too.
        for text in ("theirs\nmore", "theirs\nless"):
            there.see("edit-note").click()
            there.see("note-field").fill(text)
            there.see("save-note").click()
            expect(here.see("note")).to_have_text(text)
        # One page filters its table by the tag, and the other page removes the tag from a trial.
        there.see("search").fill("tag:keep")
        expect(there.see("table-count")).to_contain_text("1 of 2")
        expect(there.see(f"row-{second}")).to_be_hidden()
        here.see("tags").get_by_role("button", name="Remove tag keep").click()
        expect(there.see("table-count")).to_contain_text("0 of 2")
        assert experiment.get(f"/trials/{first}")["tags"] == []
        # The overview shows the tags and the note of the experiment itself, which the next steps change.
        for person in (here, there):
            person.see("nav-overview").click()
        here.see("new-tag").fill("baseline")
        here.see("add-tag").click()
        expect(there.see("tags")).to_have_text("baseline×")
        here.see("edit-note").click()
        here.see("note-field").fill(HOSTILE)
        here.page.keyboard.press("Escape")
        expect(here.see("edit-note")).to_have_text("Add a note")
        here.see("edit-note").click()
        here.see("note-field").fill("the first")
        here.see("save-note").click()
        expect(there.see("note")).to_have_text("the first")
        assert (experiment.summary()["tags"], experiment.summary()["note"]) == (["baseline"], "the first")
        there.see("nav-experiments").click()
        expect(there.see("experiments")).to_contain_text("baseline")
        search = there.page.get_by_label("Search experiments")
        search.fill("tag:other")
        expect(there.see("experiments")).not_to_contain_text("TESTEXPT")
        search.fill("tag:baseline test")
        expect(there.see("experiments")).to_contain_text("TESTEXPT")
        for person in (here, there):
            assert person.evaluate("window.hacked") is None
            assert person.page.locator("img[src=x]").count() == 0
            assert [each for each in person.errors if "400" not in each] == []
            person.errors.clear()


def test_a_read_only_view_names_the_commands_that_change_tags_and_notes(browser, tmp_path):
    folder = made_experiment(tmp_path, 3).folder
    write(
        folder,
        remarks_row("00001", Remarks(("keep", "lr/high"), HOSTILE)),
        remarks_row(None, Remarks(("baseline",), "ours")),
    )
    with served_view(folder) as view, visit(browser, view.link()) as person:
        expect(person.see("tags")).to_have_text("baseline")
        expect(person.see("note")).to_have_text("ours")
        expect(person.see("remarks")).to_contain_text("nnictl experiment tag ID --add TAG")
        person.screenshot("tags-overview")
        person.see("nav-trials").click()
        expect(person.see("row-00001")).to_contain_text("keep lr/high")
        person.see("expand-00001").click()
        expect(person.see("tags")).to_have_text("keeplr/high")
        expect(person.see("note")).to_have_text(HOSTILE.replace("\u202e", ""))
        expect(person.see("remarks")).to_contain_text("nnictl trial tag --trial-id 00001 --add TAG")
        expect(person.see("edit-note")).to_have_count(0)
        expect(person.see("new-tag")).to_be_hidden()
        assert person.evaluate("window.hacked") is None
        person.screenshot("tags-trial")
        assert person.faults_for_assistive_technology() == []
        narrow(person)


def narrow(person: Visit) -> None:
    person.page.set_viewport_size({"width": 390, "height": 800})
    assert person.evaluate("document.documentElement.scrollWidth") <= 390
