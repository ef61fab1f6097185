"""`data`: fetch, verify and cache a known corpus; without a name, list all of them."""


def arguments(parser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="a corpus, such as wikitext2")


def run(args, overrides) -> int:
    from transformer.data.corpora import CORPORA, fetch

    if args.name is None:
        for name, corpus in CORPORA.items():
            print(f"{name:<16}{corpus.about}\n{'':<16}{corpus.license}; {corpus.attribution}")
        return 0
    corpus, folder = fetch(args.name)
    print(f"{args.name}: {corpus.about}")
    print(f"license      {corpus.license}\nattribution  {corpus.attribution}")
    for file in sorted(folder.iterdir()):
        print(f"             {file}  {file.stat().st_size:,} bytes")
    return 0
