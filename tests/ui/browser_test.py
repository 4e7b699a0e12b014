#!/usr/bin/python3
"""The page of `lockstep ui` in headless Chromium: browser_test.py LOCKSTEP TEST_RANKS [NAME...].

Each function test_... is a test with a fresh page. With LOCKSTEP_TEST_SCREENSHOTS=FOLDER, pictures of the page are
written there."""

import base64
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time


def skip(why):
    print(f"could not run: ui_browser: {why}")
    sys.exit(0)


try:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
except ImportError:
    skip("there is no Selenium for Python (apt-get install python3-selenium)")

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
if not BROWSER:
    skip("there is no Chromium (apt-get install chromium)")
if not DRIVER:
    skip("there is no driver of Chromium (apt-get install chromium-driver)")

PATIENCE = 60  # seconds; only a hang takes so long
LOCKSTEP, TEST_RANKS = sys.argv[1:3]
PICTURES = os.environ.get("LOCKSTEP_TEST_SCREENSHOTS")


# --- runs

def write(path, text):
    """Replaces a file, as ranks do."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path + ".new", "w") as file:
        file.write(text)
    os.rename(path + ".new", path)


def step_line(step, scale):
    loss = None if step == 30 else scale * (0.1 + 2 / (1 + step / 10))
    record = {"type": "step", "step": step, "epoch": step / 100, "seconds": step * 0.5, "loss": loss, "lr": 0.1 / scale}
    return json.dumps(record) + "\n"


def write_run(folder, name, scale, steps=200):
    lines = "".join(step_line(step, scale) for step in range(1, steps + 1))
    lines += "".join(json.dumps({"type": "epoch", "step": 100 * epoch, "epoch": epoch, "seconds": 50 * epoch,
                                 "accuracy": epoch * 0.3}) + "\n" for epoch in range(1, 1 + steps // 100))
    write(f"{folder}/{name}/metrics.jsonl", lines)
    write(f"{folder}/{name}/settings.json", json.dumps({"lr": 0.1 / scale, "batch_size": 32, "optimizer": "sgd"}))


def write_rank(run, rank, **changes):
    now = time.time()
    values = {"format": 1, "job": "j", "attempt": 0, "rank": rank, "world_size": 2, "local_rank": rank, "host": "node0",
              "pid": 100 + rank, "device": "cpu", "started": now - 60, "updated": now + 3600, "state": "running",
              "step": 200, "epoch": 2.0, "epochs": 4, "batch": 0, "batches": 100, "steps_per_second": 10.0,
              "samples_per_second": 320.0,
              "time": {"forward": 0.3, "backward": 0.4, "communication": 0.2, "data": 0.05, "other": 0.05},
              "call": None, "memory": {"resident_bytes": 1 << 30}, "gpu": None, "failure": None}
    values.update(changes)
    write(f"{run}/live/rank-{rank:05d}.json", json.dumps(values))


FAILURE = {"kind": "PeerError", "message": "rank 0 (pid 100 on node0) is gone: its connection was closed",
           "flight_recorder": "/tmp/lockstep-flight-101-rank1.jsonl",
           "calls": [{"ticket": 5, "group": "world", "call": "call 5", "operation": "all_reduce",
                      "what": "all_reduce(avg, Float[4])", "state": "running", "site": "train.cpp:32",
                      "started_s_ago": 0.5, "took_s": None}]}


# --- the browser

class Page:
    """A server of some runs, and a browser that shows its page."""

    def __init__(self, driver, folder):
        self.driver, self.folder = driver, folder
        self.server = subprocess.Popen([LOCKSTEP, "ui", folder], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                       text=True)
        self.url = self.server.stdout.readline().strip()
        self.resize(1440, 900)
        self.prefer("light")
        self.driver.get(self.url)

    def close(self):
        self.driver.get("about:blank")
        self.server.send_signal(signal.SIGINT)
        assert self.server.wait(PATIENCE) == 0, "lockstep ui ended with another exit code"
        self.server.stdout.close()

    def js(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def wait(self, what, condition):
        """Polls until the condition, a script or a function, is true. Returns its value."""
        deadline = time.time() + PATIENCE
        while time.time() < deadline:
            value = self.js("return " + condition) if isinstance(condition, str) else condition()
            if value:
                return value
            time.sleep(0.02)
        self.picture("failure")
        raise AssertionError(f"not in {PATIENCE} s: {what}")

    def wait_for_curves(self, runs, metric="loss"):
        self.wait(f"{runs} curves of {metric}", f"window.lockstep && lockstep.charts.get('{metric}')?.lines"
                  f".filter(l => l.steps.points + l.epochs.points > 0).length === {runs}")

    def texts(self, selector):
        return self.js("return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)", selector)

    def one(self, selector):
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector):
        return self.js("return document.querySelector(arguments[0])?.textContent ?? ''", selector)

    def overlay(self, metric="loss"):
        return self.one(f"figure[data-metric='{metric}'] .overlay")

    def domain(self, metric="loss"):
        return self.js("const d = lockstep.charts.get(arguments[0]).domain; return [d.from, d.to]", metric)

    def ink(self, metric="loss"):
        """How many pixels of the canvas are drawn."""
        return self.js("""const shown = lockstep.charts.get(arguments[0]).canvas, c = document.createElement('canvas');
            c.width = shown.width; c.height = shown.height;
            const context = c.getContext('2d', {willReadFrequently: true});
            context.drawImage(shown, 0, 0);
            const d = context.getImageData(0, 0, c.width, c.height).data;
            let n = 0; for (let i = 3; i < d.length; i += 4) if (d[i] > 0) n += 1; return n""", metric)

    def resize(self, width, height):
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                                    {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False})

    def prefer(self, scheme):
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia",
                                    {"features": [{"name": "prefers-color-scheme", "value": scheme}]})

    def press(self, *keys):
        ActionChains(self.driver).send_keys(*keys).perform()

    def tab_to(self, condition):
        """Presses Tab until the focused element fulfils the condition (a script with the element `e`)."""
        for _ in range(200):
            self.press(Keys.TAB)
            if self.js(f"const e = document.activeElement; return {condition}"):
                return
        raise AssertionError("Tab never reaches: " + condition)

    def picture(self, name):
        if not PICTURES:
            return
        os.makedirs(PICTURES, exist_ok=True)
        data = self.driver.execute_cdp_cmd("Page.captureScreenshot", {})["data"]
        with open(f"{PICTURES}/{name}.png", "wb") as file:
            file.write(base64.b64decode(data))


# --- tests

def three_runs(folder):
    for name, scale in (("slow", 1), ("fast", 0.5), ("wild", 2)):
        write_run(folder, name, scale)


def live_job(folder):
    write_run(folder, "job", 1)
    for rank in range(2):
        write_rank(f"{folder}/job", rank)
        write(f"{folder}/job/live/output-{rank:05d}.log", f"hello of rank {rank}\n<b>not bold</b>\n")


def test_shows_all_runs_and_metrics(page):
    page.wait_for_curves(3)
    assert page.texts(".chart h3") == ["loss", "lr", "accuracy"]
    assert sorted(page.texts(".run-name")) == ["fast", "slow", "wild"]
    assert page.ink() > 1000
    assert "token" not in page.driver.current_url
    page.driver.refresh()  # the cookie is enough now
    page.wait_for_curves(3)


test_shows_all_runs_and_metrics.runs = three_runs


def dated_runs(folder):
    """Runs that ended some hours ago; the names are in another order than the times."""
    for name, hours in (("b", 3), ("d", 1), ("a", 2), ("c", 4)):
        write_run(folder, name, 1)
        then = time.time() - 3600 * hours
        os.utime(f"{folder}/{name}/metrics.jsonl", (then, then))


def test_lists_the_newest_runs_first(page):
    page.wait_for_curves(4)
    assert page.texts(".run-name") == ["d", "a", "b", "c"]
    page.js("document.querySelectorAll('.run-name')[3].focus()")
    with open(f"{page.folder}/c/metrics.jsonl", "a") as file:
        file.write(step_line(201, 1))
    page.wait("the run that trains at the top", lambda: page.texts(".run-name") == ["c", "d", "a", "b"])
    assert page.js("return document.activeElement.textContent") == "c", "the focus is lost"


test_lists_the_newest_runs_first.runs = dated_runs


def test_selects_and_finds_runs(page):
    page.wait_for_curves(3)
    page.one("#select-none").click()
    page.wait("the hint", "document.getElementById('no-curves').hidden === false")
    page.one("#search").send_keys("wild")
    page.wait("one run in the list", "[...document.querySelectorAll('#runs li')].filter(e => !e.hidden).length === 1")
    page.one("#select-all").click()
    page.wait_for_curves(1)
    assert page.js("return lockstep.charts.get('loss').lines[0].name") == "wild"
    assert page.text("#run-count").startswith("1 of 3 selected")


test_selects_and_finds_runs.runs = three_runs


def test_zooms_all_charts_and_resets(page):
    page.wait_for_curves(3)
    chart = page.overlay()
    width = chart.size["width"]
    ActionChains(page.driver).move_to_element_with_offset(chart, -width // 4, 0).click_and_hold() \
        .move_by_offset(width // 4, 0).release().perform()
    page.wait("a smaller part", "lockstep.charts.get('loss').domain.to < 150")
    begin, end = page.domain()
    assert 20 < begin < 80 and 80 < end < 120, (begin, end)
    page.wait("the same part in the other chart", f"lockstep.charts.get('lr').domain.from === {begin}")
    assert page.js("return Math.max(...lockstep.charts.get('loss').lines[0].steps.x)") <= end + 2
    ActionChains(page.driver).double_click(page.overlay()).perform()
    page.wait("the whole curve", lambda: page.domain() == [0, 200])
    assert page.one("#reset-zoom").get_attribute("disabled")


test_zooms_all_charts_and_resets.runs = three_runs


def test_changes_axes(page):
    page.wait_for_curves(3)
    linear = page.js("return lockstep.charts.get('loss').yScale.at(1)")
    page.one("#log-y").click()
    page.wait("a logarithmic axis", "lockstep.charts.get('loss').yScale.isLog")
    assert page.js("return lockstep.charts.get('loss').yScale.at(1)") != linear
    page.one("#log-x").click()
    page.wait("a logarithmic horizontal axis", "lockstep.charts.get('loss').xScale.isLog")
    page.one("input[name=x][value=time] + span").click()
    page.wait("time", "lockstep.charts.get('loss').domain.to === 100")
    page.one("input[name=x][value=epoch] + span").click()
    page.wait("epochs", "lockstep.charts.get('loss').domain.to === 2")


test_changes_axes.runs = three_runs


def noisy_runs(folder):
    """A loss that goes up and down, and a rate that is divided by four twice."""
    for name, scale in (("slow", 1), ("fast", 0.5), ("wild", 2)):
        records = [{"type": "step", "step": step, "epoch": step / 100, "seconds": step * 0.5,
                    "loss": None if step == 30 else scale * (2 + step * 7919 % 13 / 13),
                    "lr": 0.025 / 4 ** (step // 80)} for step in range(1, 201)]
        write(f"{folder}/{name}/metrics.jsonl", "".join(json.dumps(record) + "\n" for record in records))


def test_smooths(page):
    page.wait_for_curves(3)
    page.wait_for_curves(3, "lr")
    slider = page.one("#smoothing")
    page.js("arguments[0].value = 0; arguments[0].dispatchEvent(new Event('input'))", slider)
    page.wait("raw curves", "!lockstep.charts.get('loss').lines[0].steps.smooth")
    page.js("arguments[0].focus()", slider)
    page.press(Keys.END)
    page.wait("smooth curves", "lockstep.view.smoothing === 0.99 && lockstep.charts.get('loss').lines[0].steps.smooth")
    assert page.text("#smoothing-value") == "0.99"
    # The debiased mean, as a reference computes it.
    low, smooth = page.js("""const line = lockstep.charts.get('loss').lines.find(l => l.name === 'slow');
        return [line.steps.low, line.steps.smooth]""")
    total = weights = 0
    for value, shown in zip(low, smooth):
        if value is None:
            assert shown is None
            continue
        total, weights = 0.99 * total + 0.01 * value, 0.99 * weights + 0.01
        assert abs(shown - total / weights) < 1e-5 * abs(shown), (shown, total / weights)
    rates = page.js("""const chart = lockstep.charts.get('lr');
        return chart.lines.map(l => [l.steps.smooth ?? null, l.steps.low, chart.valuesAt(200).map(v => v.value)])""")
    for smooth, recorded, at_the_end in rates:
        assert smooth is None, "a schedule is smoothed"
        assert recorded == [0.025 / 4 ** (step // 80) for step in range(1, 201)], recorded
        assert at_the_end == [0.0015625] * 3, at_the_end


test_smooths.runs = noisy_runs


def test_shows_values_at_the_crosshair(page):
    page.wait_for_curves(3)
    ActionChains(page.driver).move_to_element(page.overlay()).perform()
    page.wait("the values", "!document.querySelector(\"figure[data-metric='loss'] .tip\").hidden")
    tip = page.text("figure[data-metric='loss'] .tip")
    assert all(name in tip for name in ("fast", "slow", "wild", "step")), tip


test_shows_values_at_the_crosshair.runs = three_runs


def test_compares_settings(page):
    page.wait_for_curves(3)
    head = page.js("return [...document.querySelectorAll('#table thead th')].map(e => e.textContent)")
    assert head[:3] == ["Run", "State", "★ lr"], head
    assert head.index("batch_size") > head.index("loss"), head
    page.one("#table [data-column='setting lr']").click()
    rows = lambda: page.js("return [...document.querySelectorAll('#table tbody th')].map(e => e.textContent)")
    assert rows() == ["wild", "slow", "fast"], rows()
    page.one("#table [data-column='setting lr']").click()
    assert rows() == ["fast", "slow", "wild"], rows()
    assert page.js("return document.querySelector('#table th[aria-sort=descending]').textContent") == "★ lr ▼"


test_compares_settings.runs = three_runs


def test_follows_a_run_that_trains(page):
    page.wait_for_curves(1)
    ink = page.ink()
    with open(f"{page.folder}/job/metrics.jsonl", "a") as file:
        file.write("".join(step_line(step, 1) for step in range(201, 401)))
    page.wait("new points", "lockstep.charts.get('loss').lines[0].steps.last_x === 400")
    page.wait("the longer axis", "lockstep.charts.get('loss').domain.to === 400")
    assert page.ink() != ink
    write_run(page.folder, "later", 3)
    page.wait("a new run in the list", lambda: "later" in page.texts(".run-name"))


test_follows_a_run_that_trains.runs = live_job


def test_shows_ranks_and_their_failure(page):
    page.wait("two ranks", "document.querySelectorAll('#ranks tbody tr.running').length === 2")
    assert "2 ranks" in page.text("#job-line")
    assert page.js("return document.querySelector('#ranks .bar').title").startswith("forward 30 %, backward 40 %")
    calm = page.js("return getComputedStyle(document.querySelector('#ranks tr[data-rank=\"1\"] td')).backgroundColor")
    write_rank(f"{page.folder}/job", 1, state="failed", failure=FAILURE)
    page.wait("a failed rank", "document.querySelector('#ranks tr[data-rank=\"1\"]').classList.contains('failed')")
    red = page.js("return getComputedStyle(document.querySelector('#ranks tr[data-rank=\"1\"] td')).backgroundColor")
    assert red != calm
    assert "failed" in page.text("#ranks tr[data-rank='1'] .state")  # not by colour alone
    page.wait("the state of the run", "document.querySelector('#runs .state').textContent.includes('failed')")
    page.one("#ranks tr[data-rank='1'] button").click()
    page.wait("the details", "document.querySelector('#rank-details pre')")
    details = page.text("#rank-details")
    for part in ("PeerError", "its connection was closed", "all_reduce(avg, Float[4])", "train.cpp:32",
                 "lockstep-flight-101-rank1.jsonl", "hello of rank 1", "<b>not bold</b>"):
        assert part in details, (part, details)
    page.picture("failure-details")
    write(f"{page.folder}/job/live/output-00001.log", "one more line\n")
    page.wait("new output", "document.querySelector('#rank-details pre').textContent.includes('one more line')")


test_shows_ranks_and_their_failure.runs = live_job


def test_marks_stragglers_and_silence(page):
    page.wait("two ranks", "document.querySelectorAll('#ranks tbody tr.running').length === 2")
    shares = {"forward": 0.5, "backward": 0.45, "communication": 0.0, "data": 0.05, "other": 0}
    write_rank(f"{page.folder}/job", 0, time=shares)
    page.wait("the straggler", "!document.querySelector('#ranks tr[data-rank=\"0\"] .straggler').hidden")
    write_rank(f"{page.folder}/job", 0, updated=time.time() - 60)
    page.wait("silence", "document.querySelector('#ranks tr[data-rank=\"0\"]').classList.contains('silent')")
    assert "no news" in page.text("#ranks tr[data-rank='0'] .state")
    write(f"{page.folder}/job/live/rank-00000.json", "{\"format\": 1, \"ran")  # damaged
    page.wait("the damaged file", "document.getElementById('job-report').textContent.includes('rank-00000.json')")


test_marks_stragglers_and_silence.runs = live_job


def no_runs(folder):
    pass


def a_linked_run(folder):
    write_run(folder, ".elsewhere", 1)
    os.symlink(".elsewhere", f"{folder}/linked")


def test_says_that_links_were_skipped(page):
    page.wait("the hint", "document.getElementById('no-curves').textContent"
              ".includes('symbolic links below the folders are not followed: name their targets')")


test_says_that_links_were_skipped.runs = a_linked_run


def test_says_why_there_is_no_output(page):
    log = f"{page.folder}/job/live/output-00000.log"
    os.rename(log, f"{page.folder}/log")
    os.symlink("../../log", log)
    page.wait("two ranks", "document.querySelectorAll('#ranks tbody tr.running').length === 2")
    page.one("#ranks tr[data-rank='0'] button").click()
    page.wait("the reason", "document.querySelector('#rank-details pre')?.textContent === 'The output cannot be shown: "
              "it is a symbolic link, which is not followed'")


test_says_why_there_is_no_output.runs = live_job


def test_watches_a_real_job(page):
    """Four ranks, of which one is slow and one is killed."""
    command = [LOCKSTEP, "run", "-n", "4", TEST_RANKS, "running_rank", "watched", f"{page.folder}/job", "slow", "2"]
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                           env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        page.wait("four ranks", "document.querySelectorAll('#ranks tbody tr.running').length === 4")
        page.wait("the slow rank", "!document.querySelector('#ranks tr[data-rank=\"2\"] .straggler').hidden")
        page.wait("a curve", "window.lockstep && lockstep.charts.get('loss')?.lines.some(l => l.steps.points > 1)")
        assert "batch_size" in page.text("#table thead")
        page.picture("real-job")
        with open(f"{page.folder}/job/live/rank-00003.json") as file:
            os.kill(json.load(file)["pid"], signal.SIGKILL)
        for rank in range(4):
            page.wait(f"the failure of rank {rank}",
                      f"document.querySelector('#ranks tr[data-rank=\"{rank}\"]').classList.contains('failed')")
        page.wait("how the rank ended",
                  "document.querySelector('#ranks tr[data-rank=\"3\"]').textContent.includes('SIGKILL')")
        page.wait("the report", "document.getElementById('job-report').textContent.includes('rank 3 (pid')")
        page.one("#ranks tr[data-rank='0'] button").click()
        page.wait("the output", "document.querySelector('#rank-details pre')?.textContent.includes('ready')")
        for part in ("PeerError", "rank 3 (pid", "all_reduce", "lockstep-flight"):
            assert part in page.text("#rank-details"), part
        page.picture("real-job-failed")
        assert job.wait(PATIENCE) != 0
    finally:
        if job.poll() is None:
            job.terminate()
            job.wait()


test_watches_a_real_job.runs = no_runs


def checkpoints(folder):
    write_run(folder, "a", 1)
    for step in (10, 20):
        write(f"{folder}/a/checkpoints/step-{step:08d}.pt", "x" * 3000)
    os.link(f"{folder}/a/checkpoints/step-00000010.pt", f"{folder}/a/checkpoints/best.pt")


def test_lists_checkpoints(page):
    page.wait("checkpoints", "document.querySelectorAll('#checkpoints tbody tr').length === 3")
    rows = page.js("return [...document.querySelectorAll('#checkpoints tbody tr')].map(e => e.textContent)")
    assert rows[0].startswith("best.pt★ best: step-00000010.pt2.9 KiB"), rows
    os.remove(f"{page.folder}/a/checkpoints/step-00000020.pt")
    page.wait("one less", "document.querySelectorAll('#checkpoints tbody tr').length === 2")


test_lists_checkpoints.runs = checkpoints


def test_works_with_keys_only(page):
    page.wait_for_curves(1)
    page.wait("two ranks", "document.querySelectorAll('#ranks tbody tr').length === 2")
    page.js("document.activeElement.blur()")
    page.tab_to("e.matches('.skip')")
    page.tab_to("e.matches('#runs input[type=checkbox]')")
    page.press(Keys.SPACE)
    page.wait("no run selected", "lockstep.selected.size === 0")
    page.press(Keys.SPACE)
    page.wait_for_curves(1)
    page.tab_to("e.matches('#ranks button')")
    page.press(Keys.ENTER)
    page.wait("details", "!document.getElementById('rank-details').hidden")
    page.tab_to("e.matches('input[name=x]')")
    page.press(Keys.ARROW_RIGHT)
    page.wait("epochs", "lockstep.view.x === 'epoch'")
    page.press(Keys.ARROW_LEFT)
    page.wait("steps", "lockstep.view.x === 'step' && lockstep.charts.get('loss').domain.to === 200")
    page.tab_to("e.matches(\"figure[data-metric='loss'] .overlay\")")
    assert page.js("return getComputedStyle(document.activeElement).outlineStyle") == "solid"  # visible focus
    page.press(Keys.ARROW_RIGHT)
    page.wait("spoken values", "document.getElementById('announcer').textContent.startsWith('loss, step ')")
    page.press("+")
    page.wait("a zoom", "lockstep.view.zoom !== null && lockstep.charts.get('loss').domain.to < 200")
    page.press("0")
    page.wait("no zoom", "lockstep.view.zoom === null")
    page.tab_to("e.matches('#table thead button')")
    page.press(Keys.ENTER)
    page.wait("a sorted table", "document.querySelector('#table th[aria-sort=ascending]') !== null")


test_works_with_keys_only.runs = live_job


def test_describes_charts_to_screen_readers(page):
    page.wait_for_curves(3)
    canvas = page.overlay()
    assert canvas.get_attribute("aria-label") == "Chart of loss over step, 3 runs"
    assert canvas.get_attribute("aria-describedby") == "summary-loss"
    summary = page.js("return document.getElementById(arguments[0]).textContent", "summary-loss")
    assert "slow: last 0.19524, lowest 0.19524, highest 1.9182" in summary, summary
    unnamed = page.js("""return [...document.querySelectorAll('button, input, [tabindex]')]
        .filter(e => e.offsetParent && e.id !== 'main' && !e.textContent && !e.labels?.length &&
                     !e.getAttribute('aria-label') && !e.getAttribute('aria-labelledby')).map(e => e.outerHTML)""")
    assert unnamed == [], unnamed


test_describes_charts_to_screen_readers.runs = three_runs


def test_fits_narrow_windows_and_dark_mode(page):
    page.wait_for_curves(1)
    page.wait("ranks", "document.querySelectorAll('#ranks tbody tr').length === 2")
    for width, height in ((1440, 900), (400, 800)):
        page.resize(width, height)
        for scheme in ("light", "dark"):
            page.prefer(scheme)
            page.wait("the width", f"lockstep.charts.get('loss').canvas?.width <= {width} && innerWidth === {width}")
            page.wait("a redraw", "[...lockstep.charts.values()]"
                      ".every(c => !c.isVisible || c.canvas.width === Math.round(c.width))")
            assert page.js("return document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
            dark = page.js("return getComputedStyle(document.body).backgroundColor") == "rgb(13, 17, 23)"
            assert dark == (scheme == "dark")
            page.picture(f"{width}x{height}-{scheme}")
    chart = page.overlay()
    page.js("arguments[0].scrollIntoView()", chart)
    assert chart.size["width"] > 300


test_fits_narrow_windows_and_dark_mode.runs = live_job


def strange_runs(folder):
    write(f"{folder}/<img src=x onerror=alert(1)>/metrics.jsonl",
          '{"type":"step","step":1,"<script>alert(2)</script>":1}\ngarbage\n{"type":"step","step":2,"loss":2}\n')
    write(f"{folder}/empty/metrics.jsonl", "")
    write(f"{folder}/broken/metrics.jsonl", "\0\0\0" * 100)
    write(f"{folder}/broken/settings.json", '{"a": ')
    write(f"{folder}/broken/live/rank-00000.json", "[]")


def test_shows_strange_runs_as_text(page):
    page.wait("three runs", "document.querySelectorAll('#runs li').length === 3")
    page.wait("a chart", "document.querySelectorAll('.chart').length === 2")
    assert page.js("return document.querySelectorAll('img, .chart script').length") == 0
    problems = page.wait("problems", lambda: "".join(page.texts(".problem:not([hidden])")))
    assert "1 damaged line" in problems, problems


test_shows_strange_runs_as_text.runs = strange_runs


def test_survives_the_end_of_the_server(page):
    page.wait_for_curves(3)
    page.server.send_signal(signal.SIGINT)
    page.server.wait(PATIENCE)
    page.wait("the notice", "document.getElementById('status').textContent.includes('No connection')")


test_survives_the_end_of_the_server.runs = three_runs
test_survives_the_end_of_the_server.errors = "ERR_CONNECTION_REFUSED"


def many_runs(folder):
    for number in range(50):
        lines = "".join(f'{{"type":"step","step":{step},"epoch":{step / 1000},"seconds":{step / 100},'
                        f'"loss":{(step * 7919 + number * 31) % 1000 / 1000 + 1e4 / (step + 1e4):.6f}}}\n'
                        for step in range(1, 100001))
        write(f"{folder}/run-{number:02d}/metrics.jsonl", lines)


def test_is_fluid_with_fifty_runs_of_100000_points(page):
    page.wait("all runs read", "document.getElementById('status').textContent === '50 runs'")
    begin = time.time()
    page.driver.get(page.url)
    page.wait_for_curves(8)
    opened = time.time() - begin
    begin = time.time()
    page.one("#select-all").click()
    page.wait_for_curves(50)
    selected = time.time() - begin
    frames = page.driver.execute_async_script("""
        const done = arguments[0], chart = lockstep.charts.get('loss'), frames = [];
        let last = performance.now();
        function frame() {
          const now = performance.now(); frames.push(now - last); last = now; chart.draw();
          if (frames.length < 100) requestAnimationFrame(frame); else done(frames);
        }
        requestAnimationFrame(frame);""")
    drawn = page.js("return lockstep.drawTimes.slice(-100)")
    print(f"  opens in {opened:.2f} s, 50 runs in {selected:.2f} s, a redraw takes {statistics.median(drawn):.1f} ms, "
          f"frames with a redraw {statistics.median(frames):.1f} ms")
    assert opened < 5 and selected < 5, "seconds; a busy machine without a GPU needs more than one"
    assert statistics.median(drawn) < 16


test_is_fluid_with_fifty_runs_of_100000_points.runs = many_runs


def many_metrics(folder):
    for name in ("a", "b", "c"):
        lines = "".join(json.dumps({"type": "step", "step": step, "epoch": step / 10, "seconds": step,
                                    **{f"layer.{i}/norm": step + i / 1000 for i in range(5000)}}) + "\n"
                        for step in range(1, 4))
        write(f"{folder}/{name}/metrics.jsonl", lines)


def test_draws_only_what_is_visible_of_thousands_of_metrics(page):
    """Bounds the work, not the time."""
    drawn = "[...lockstep.charts.values()].filter(c => c.canvas).length"
    cells = "document.querySelectorAll('#table th, #table td').length"
    page.wait_for_curves(3, "layer.0/norm")
    assert page.js("return document.querySelectorAll('.chart').length") == 5000
    assert 0 < page.js("return " + drawn) < 40
    assert page.js("return " + cells) < 1000
    assert "100 of 5000 results are shown" in page.text("#table-hint")
    page.js("document.querySelector(\"figure[data-metric='layer.4999/norm']\").scrollIntoView()")
    page.wait_for_curves(3, "layer.4999/norm")
    page.wait("the first charts let go", "lockstep.charts.get('layer.0/norm').canvas === null")
    assert 0 < page.js("return " + drawn) < 40
    assert page.js("return [...lockstep.charts.values()].filter(c => c.lines.length > 0).length") < 120
    page.one("#metric-filter").send_keys("layer.77/")
    page.wait("one chart", "document.querySelectorAll('.chart').length === 1")
    page.wait_for_curves(3, "layer.77/norm")


test_draws_only_what_is_visible_of_thousands_of_metrics.runs = many_metrics


# --- running them

def start_browser(profile):
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                     "--disable-background-networking", "--no-proxy-server", f"--user-data-dir={profile}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(service=Service(DRIVER), options=options)
    driver.set_script_timeout(PATIENCE)
    return driver


def run(driver, test):
    driver.get_log("browser")  # of the test before
    with tempfile.TemporaryDirectory() as folder:
        test.runs(folder)
        page = Page(driver, folder)
        try:
            test(page)
            expected = getattr(test, "errors", None)
            log = driver.get_log("browser")
            errors = [entry["message"] for entry in log if entry["level"] in ("SEVERE", "WARNING")]
            errors = [message for message in errors if not expected or expected not in message]
            assert not errors, f"the console has errors: {errors}"
        finally:
            page.close()


def main():
    wanted = sys.argv[3:]
    tests = [value for name, value in globals().items() if name.startswith("test_")]
    tests = [test for test in tests if not wanted or any(part in test.__name__ for part in wanted)]
    assert tests, f"no test has a name with {wanted}"
    failed = []
    with tempfile.TemporaryDirectory() as profile:
        driver = start_browser(profile)
        try:
            for test in tests:
                begin = time.time()
                try:
                    run(driver, test)
                    print(f"ok      {test.__name__} ({time.time() - begin:.1f} s)", flush=True)
                except Exception as error:  # the others still run
                    failed.append(test.__name__)
                    print(f"FAILED  {test.__name__}: {error}", flush=True)
        finally:
            driver.quit()
    print(f"{len(tests) - len(failed)} of {len(tests)} tests passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
