"""Pages of reports: tables, links to sections, and titles that may break."""

import re

from meshpar import html_page


def test_a_page_links_to_its_sections(tmp_path):
    body = "<h2>a &lt; b</h2><p>x</p><h2>fsdp=2,tensor=4</h2>"
    html_page.write(tmp_path / "page.html", "n: data=2,fsdp=4, <1>", body)
    text = (tmp_path / "page.html").read_text()
    assert "<title>n: data=2,fsdp=4, &lt;1&gt;</title>" in text
    assert "<h1>n: data=2,<wbr>fsdp=4, &lt;1&gt;</h1>" in text
    links = re.findall(r'<a href="#(\w+)">(.*?)</a>', text)
    assert links == re.findall(r'<h2 id="(\w+)">(.*?)</h2>', text)
    assert [title for _, title in links] == ["a &lt; b", "fsdp=2,<wbr>tensor=4"]
    html_page.write(tmp_path / "page.html", "one", "<h2>section</h2>")
    assert "<nav>" not in (tmp_path / "page.html").read_text()


def test_a_table_without_rows_says_so():
    assert html_page.table(("layout", "bytes"), []) == "<p>None.</p>"
    text = html_page.table(("layout", "bytes"), [("<a>", 2e6), ("b", 3000)])
    assert "<td>&lt;a&gt;</td>" in text and '<td class="number">2.00 MB</td>' in text
    assert '<td class="number">3,000</td>' in text
