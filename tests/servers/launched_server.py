"""A server of ours that behaves, or misbehaves, as SGLang does: for the tests of the supervisor."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.fake_answers import answer_ids, scored_ids


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--name", required=True, help="the model's name")
    parser.add_argument("--pool", type=int, default=8192)
    parser.add_argument("--pids", type=Path, required=True, help="the pids of every start are appended here")
    parser.add_argument("--deaf", action="store_true", help="ignores SIGTERM")
    parser.add_argument("--mute", action="store_true", help="healthy, but never generates")
    parser.add_argument("--child", choices=["group", "own-session"], help="starts a worker")
    parser.add_argument("--crash", type=Path, help="ends with status 3 at its start while this file exists")
    parser.add_argument("--busy", type=Path, help="a port that is taken, once: removed on the way")
    parser.add_argument("--asked", type=Path, help="prompts that it was asked are appended here, as JSON")
    parser.add_argument("--drift", type=float, default=0.0, help="share of decoded tokens that come out wrong")
    parser.add_argument("--token-s", type=float, default=0.0, help="seconds per token of an answer")
    args = parser.parse_args()

    pids = [os.getpid()]
    if args.child:
        worker = [sys.executable, "-c", "import signal,time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"]
        pids.append(subprocess.Popen(worker, start_new_session=args.child == "own-session").pid)
    with args.pids.open("a") as file:
        file.write(" ".join(map(str, pids)) + "\n")
    if args.deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if args.crash and args.crash.exists():
        print("a weight is missing", flush=True)
        os._exit(3)
    if args.busy and args.busy.exists():
        args.busy.unlink()
        print("OSError: [Errno 98] address already in use", flush=True)
        os._exit(1)
    print(f"max_total_num_tokens={args.pool}, chunked_prefill_size=8192", flush=True)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self.reply({"data": [{"id": args.name}]})
            else:
                self.reply({"version": "0.5.23"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/die":
                os._exit(5)
            if args.mute:
                return self.reply({"output_ids": []})
            print("Decode batch, #running-req: 1, gen throughput (token/s): 41.50, #queue-req: 0", flush=True)
            most = body.get("sampling_params", {}).get("max_new_tokens", 1)
            if body.get("return_logprob"):
                assert body["sampling_params"]["ignore_eos"]
                scored = scored_ids(body["input_ids"], most, args.drift)
                return self.reply({"meta_info": {"output_token_logprobs": scored}})
            return self.reply({"output_ids": [7]} if most == 1 else self.answer(body["input_ids"], most))

        def answer(self, ids: list[int], most: int) -> dict[str, object]:
            if args.asked:
                with args.asked.open("a") as file:
                    file.write(json.dumps(ids) + "\n")
            output_ids, reason = answer_ids(ids, most)
            time.sleep(args.token_s * len(output_ids))
            finish = {"type": reason, **({"matched": output_ids[-1]} if reason == "stop" else {})}
            meta = {"finish_reason": finish, "prompt_tokens": len(ids), "cached_tokens": 1}
            return {"output_ids": output_ids, "meta_info": meta}

        def reply(self, value: object) -> None:
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    ThreadingHTTPServer.request_queue_size = 128
    ThreadingHTTPServer(("127.0.0.1", args.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
