"""`python -m flatfsdp.train`: train a byte-level transformer under FSDP on this machine, or in torchrun's world.

Exit codes: 0 when trained, 1 when a rank failed, 2 for a wrong option, 130 when interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch.multiprocessing as mp

from flatfsdp.errors import ConfigValueError
from flatfsdp.trainer.data import check_corpus
from flatfsdp.trainer.launch import Plan, run
from flatfsdp.trainer.loop import job
from flatfsdp.trainer.options import Options, make_parser, parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trainer with `arguments` (default: the command line's); returns the exit code.

    A wrong option raises `SystemExit(2)` after one line on stderr, before any process is started.
    """
    parser = make_parser()
    options = parse(parser, sys.argv[1:] if arguments is None else arguments)
    try:
        plan = prepare(options)
    except ConfigValueError as error:
        parser.error(str(error))
    try:
        run(job, plan, options)
    except mp.ProcessRaisedException as error:
        print(f"flatfsdp.train: rank {error.error_index} failed{error}", file=sys.stderr)
        return 1
    except mp.ProcessExitedException as error:
        print(f"flatfsdp.train: rank {error.error_index} died: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("flatfsdp.train: interrupted", file=sys.stderr)
        return 130
    return 0


def prepare(options: Options) -> Plan:
    """Look at devices, text and output folder before anything is started, and plan the ranks.

    Raises:
        ConfigValueError: an option asks for what this machine does not have.
    """
    plan = Plan.of(options)
    check_corpus(options.data, valid_part=options.valid_part, context=options.context)
    if options.plot:
        try:
            options.out.mkdir(parents=True, exist_ok=True)  # now, not when the time to train has been spent
        except OSError as error:
            raise ConfigValueError(
                f"argument --out: cannot make the folder {str(options.out)!r}: {error.strerror}"
            ) from None
    return plan


if __name__ == "__main__":
    sys.exit(main())
