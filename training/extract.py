"""Turn package files into plain text: HTML, R data, dictionaries, JSON profiles, Python."""

from __future__ import annotations

import gzip
import json
import re
import struct
import zlib
from pathlib import Path

from lxml import etree, html

_DROP = ("script", "style", "nav", "header", "footer", "head", "form", "button", "svg", "noscript")
_BLOCK = {
    "p",
    "div",
    "section",
    "article",
    "h1",
    "h2",
    "h3",
    "h4",
    "h5",
    "h6",
    "ul",
    "ol",
    "dl",
    "dd",
    "dt",
    "li",
    "table",
    "tr",
    "blockquote",
    "main",
    "body",
}
_MAIN = (
    "//main",
    "//div[@role='main']",
    "//article",
    "//div[@id='content']",
    "//div[@id='page-content']",
    "//div[@class='body']",
    "//div[@id='docContent']",
    "//body",
)


def html_text(data: bytes) -> str:
    """Readable text of a documentation page: paragraphs split by blank lines, `<pre>` kept verbatim."""
    try:
        root = html.fromstring(data, parser=html.HTMLParser(encoding="utf-8", remove_comments=True))
    except (etree.ParserError, ValueError):
        return ""
    main = next((found[0] for path in _MAIN if (found := root.xpath(path))), root)
    classes = (
        "headerlink",
        "navheader",
        "navfooter",
        "spirit-nav",
        "sidebar",
        "toc",
        "related",
        "sphinxsidebar",
        "top",
        "search-wrap",
        "highlight-default-copy",
        "copybtn",
        "toctree-wrapper",
        "seclinks",
        "srclink",
        "mark",
    )
    for node in main.xpath("|".join(f".//{tag}" for tag in _DROP)):
        _remove(node)
    for node in main.xpath(".//*[@class]"):
        if set(node.get("class").split()) & set(classes):
            _remove(node)
    parts: list[str] = []
    _walk(main, parts)
    return tidy("".join(parts).replace("¶", ""))


def _remove(node: etree._Element) -> None:
    if node.getparent() is not None:
        node.drop_tree()


def _walk(node: etree._Element, parts: list[str]) -> None:
    tag = node.tag if isinstance(node.tag, str) else ""
    if tag == "pre":
        parts.append("\n\n" + node.text_content().strip("\n") + "\n\n")
        return
    block = tag in _BLOCK
    if block:
        parts.append("\n" if tag in ("li", "tr") else "\n\n")
    if tag == "li":
        parts.append("- ")
    parts.append(re.sub(r"\s+", " ", node.text or ""))
    for child in node:
        _walk(child, parts)
        parts.append(re.sub(r"\s+", " ", child.tail or ""))
    if tag in ("td", "th"):
        parts.append("  ")
    if tag == "br" or block:
        parts.append("\n")


def tidy(text: str) -> str:
    """Drop form feeds, trailing blanks and runs of blank lines; straighten typographic quotes and spaces."""
    text = text.replace("\r\n", "\n").replace("\f", "").replace("\u00a0", " ").replace("\u200b", "")
    text = text.translate(
        {0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"', 0x2013: "-", 0x2014: "--", 0x2026: "..."}
    )
    text = re.sub(r"[ \t]+\n", "\n", text)
    text = re.sub(r"(?m)^-\n+ *", "- ", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def rdb_strings(data: bytes) -> list[str]:
    """Character vectors of an R lazy-load database, one joined text per stored object."""
    texts, pos = [], 0
    while pos < len(data):
        # Entries follow one another: uncompressed length (big-endian), then a zlib stream.
        stream = zlib.decompressobj()
        raw = stream.decompress(data[pos + 4 :])
        pos = len(data) - len(stream.unused_data)
        words = _charsxp(raw)
        if len(words) > 1000:
            texts.append("\n".join(words))
    return texts


def _charsxp(raw: bytes) -> list[str]:
    """Strings of a serialised R object: CHARSXP records (flag word ending in 0x09), then length, then bytes."""
    out, i = [], 0
    while (i := raw.find(b"\x00\x04\x00\x09", i)) >= 0:
        (length,) = struct.unpack(">i", raw[i + 4 : i + 8])
        if 0 <= length < 10_000:
            out.append(raw[i + 8 : i + 8 + length].decode("utf-8", "replace"))
            i += 8 + length
        else:
            i += 4
    return out


def profile_text(data: bytes) -> str:
    """Sentences (not bare figures) of a country profile, each with its heading."""
    lines: list[str] = []

    def walk(node: object, names: tuple[str, ...]) -> None:
        if isinstance(node, dict):
            for key, value in node.items():
                walk(value, names if key == "text" else (*names, key))
        elif isinstance(node, str):
            clean = re.sub(r"<[^>]+>", " ", node)
            if len(clean) > 200:
                lines.append(f"{': '.join(names[1:])}\n{re.sub(chr(32) + '+', ' ', clean)}\n")

    walk(json.loads(data), ())
    return tidy("\n".join(lines))


def reflow(text: str) -> str:
    """Join hard-wrapped lines of a paragraph."""
    return "\n\n".join(" ".join(p.split()) for p in re.split(r"\n\s*\n", text))


def chapters(text: str) -> list[str]:
    """Split a novel at its chapter headings."""
    parts = re.split(r"\n(?=\s*(?:CHAPTER|Chapter) [0-9IVXLC]+)", text)
    return [p for p in parts if len(p) > 2000]


def documents(path: Path) -> list[str]:
    """The texts of one file; most hold one, novels and dictionaries several."""
    data = path.read_bytes()
    name = path.name
    if name.endswith((".html", ".htm")):
        return [html_text(data)]
    if name.endswith(".rdb"):
        return [tidy(reflow(c)) for novel in rdb_strings(data) for c in chapters(novel)]
    if name.endswith((".txt.gz", ".dz")):
        return blocks(tidy(gzip.decompress(data).decode("utf-8", "replace")), 6000)
    if name.endswith(".json"):
        return [profile_text(data)]
    return [tidy(data.decode("utf-8", "replace"))]


def blocks(text: str, size: int) -> list[str]:
    """Cut a long text into documents of about `size` characters, at blank lines."""
    out, current = [], ""
    for paragraph in text.split("\n\n"):
        current += paragraph + "\n\n"
        if len(current) > size:
            out.append(current)
            current = ""
    return [*out, current] if current.strip() else out
