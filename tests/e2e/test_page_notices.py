"""The notices of the web page in a real Chromium: all problems are named, and each can be dismissed."""

import pytest
from browser import chromium, expect, needs_chromium, visit
from made_experiment import Played, made_experiment, served_view

from nni_manager.errors import RetryableError

pytestmark = [pytest.mark.any_machine, needs_chromium]
DISK = "cannot write to /data: no space is left, {} MB wait; free some disk space"
LOGIN = "submission is suspended until the login is valid: renew `kubeconfig`"


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


@pytest.fixture
def played(tmp_path):
    return Played(made_experiment(tmp_path, 0).folder)


def button_of(person, text):
    return person.see("dismiss").and_(person.page.locator(f'[aria-label*="{text}"]'))


def test_a_dismissed_problem_stays_hidden_until_it_occurs_again(browser, played):
    played.problems = (DISK.format(1), LOGIN, "job job1 has not ended; remove it with `kubectl delete`")
    with served_view(played.folder, played) as view, visit(browser, view.link()) as person:
        problems, banners = person.see("problem"), person.see("banner-problem")

        def report(*texts):
            view.loop.call_soon_threadsafe(setattr, played, "problems", texts)

        expect(problems).to_have_count(3)
        expect(person.see("error-panel")).to_contain_text("job1")
        expect(banners).to_have_count(0)
        person.see("nav-trials").click()
        expect(banners).to_have_count(3)
        assert person.faults_for_assistive_technology() == []
        # If the keyboard dismisses a notice, the focus moves to the next notice.
        button_of(person, "no space is left").focus()
        person.page.keyboard.press("Enter")
        expect(banners).to_have_count(2)
        expect(button_of(person, "submission is suspended")).to_be_focused()
        person.page.keyboard.press("Space")
        expect(banners).to_have_count(1)
        expect(banners).to_contain_text("job1")
        # A dismissed problem stays hidden on other pages and after a reload. A visitor in another browser still sees all three
        # problems.
        person.go(f"{view.origin}/oview")
        expect(problems).to_have_count(1)
        with visit(browser, view.link()) as another:
            expect(another.see("problem")).to_have_count(3)
        # A dismissed problem stays hidden if only an amount in its text grows, as in DISK. The third problem has ended, so the
        # page removes its notice.
        report(DISK.format(2), LOGIN)
        expect(problems).to_have_count(0)
        # The page shows a problem whose text changes, such as the quota or /home. It also shows a dismissed problem that ended
        # and occurs again, such as LOGIN.
        report(DISK.format(3), "the quota is exceeded")
        expect(problems).to_contain_text("quota")
        report(DISK.format(3), LOGIN)
        expect(problems).to_contain_text("login")
        expect(problems).to_have_count(1)
        report(DISK.format(3).replace("/data", "/home"), LOGIN)
        expect(problems).to_have_count(2)
        button_of(person, "/home").click()
        button_of(person, "login").click()
        expect(problems).to_have_count(0)
        expect(person.page.locator("main")).to_be_focused()


class Interrupted(Played):
    """A scripted experiment whose state cannot be read during an outage."""

    is_out = False

    def snapshot(self):
        if self.is_out:
            raise RetryableError("cannot answer: this is an outage; try again")
        return super().snapshot()


def test_a_dismissed_outage_notice_returns_with_the_next_outage(browser, tmp_path):
    played = Interrupted(made_experiment(tmp_path, 0).folder)
    with served_view(played.folder, played) as view, visit(browser, view.link()) as person:
        lost = person.see("banner-connection")
        for _ in range(2):
            expect(person.see("connection")).to_have_attribute("data-state", "streaming")
            view.loop.call_soon_threadsafe(setattr, played, "is_out", True)
            expect(lost).to_be_visible()
            lost.get_by_role("button", name="Dismiss").click()
            expect(lost).to_have_count(0)
            expect(person.see("connection")).to_have_attribute("data-state", "silent")
            view.loop.call_soon_threadsafe(setattr, played, "is_out", False)


def test_a_dismissed_read_only_notice_stays_hidden_after_the_next_page_load(browser, tmp_path):
    with (
        served_view(made_experiment(tmp_path, 2).folder) as view,
        visit(browser, view.link()) as person,
    ):
        banner = person.see("banner-readonly")
        banner.get_by_role("button", name="Dismiss").click()
        expect(banner).to_have_count(0)
        person.go(f"{view.origin}/detail")
        expect(person.see("table")).to_be_visible()
        expect(banner).to_have_count(0)
