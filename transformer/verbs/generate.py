"""`generate`: translate or continue text, line by line.

Translate (encoder-decoder) or continue (decoder) text: one line of output per line of input.

  --config.decoding.beam_size=4 and other --config.decoding.* override the run's decoding settings.
"""

import sys
from pathlib import Path

from transformer.errors import UserError
from transformer.files import write_atomic
from transformer.output import count, counting, event
from transformer.verbs.common import ask, folder, load, read_lines, text_file


def arguments(parser) -> None:
    add = parser.add_argument
    parser.set_defaults(only_prints=True)
    add("--workdir", required=True, type=folder, metavar="DIR", help="the run")
    add("--input", default="-", type=text_file, metavar="FILE", help="default: standard input")
    add("--output", default="-", metavar="FILE", help="default: standard output")
    add("--interactive", action="store_true", help="prompt for text at the terminal")


def run(args, overrides) -> int:
    from transformer.decoding.generate import Generator
    from transformer.parallel.mesh import use
    from transformer.parallel.processes import is_first

    if args.interactive and (args.input != "-" or args.output != "-"):
        problem = "reads and writes the terminal"
        raise UserError(f"--interactive: {problem}; leave out --input and --output")
    if args.output != "-" and not Path(args.output).resolve().parent.is_dir():
        raise UserError(f"--output: no folder {Path(args.output).parent}")
    if args.output != "-" and Path(args.output).is_dir():
        raise UserError(f"--output: {args.output} is a folder; name a file")
    trained = load(args, overrides)
    with use(trained.mesh):
        if args.interactive:
            return _converse(trained)
        lines = read_lines("-") if args.input == "-" else args.input
        generate = Generator(trained.config, trained.params, trained.tokenizer)
        answers = generate(lines, counting("generating", len(lines)))
    if not is_first():
        return 0
    if generate.cut:
        text = f"of {count(len(lines), 'line')} exceeded the model's maximum length and were cut"
        print(event(generate.cut, text), file=sys.stderr)
    text = "".join(answer.replace("\n", "\\n") + "\n" for answer in answers)
    if args.output == "-":
        sys.stdout.write(text)
    else:
        write_atomic(Path(args.output), text)
    return 0


def _converse(trained) -> int:
    import readline  # noqa: F401  (arrow keys and history at the prompt)

    from transformer.decoding.generate import Generator
    from transformer.mapping import apply_overrides

    config = apply_overrides(trained.config, {"decoding.batch_size": 1})
    generate = Generator(config, trained.params, trained.tokenizer)
    action = "translates" if config.model.is_encoder_decoder else "continues"
    print("Compiling ...", end="", flush=True)
    generate(["."])
    print(f"\rThe model {action} what you type. An empty line or Ctrl-D ends.")
    while True:
        try:
            line = ask("\n> ")
        except EOFError:
            print()
            return 0
        if not line.strip():
            return 0
        cut = generate.cut
        print("  " + generate([line])[0].strip("\n").replace("\n", "\n  "))
        if generate.cut > cut:
            print("  (cut: longer than the model's maximum length)")
