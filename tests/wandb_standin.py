"""A W&B server on loopback, as far as wandb-core and the agent need one; and a reader of offline files.

    with StandIn() as server:
        run something with server.environ()
    server.runs["RUN_ID"].history

Answers the GraphQL operations of init, log, resume, finish, agent and Workspace.save; takes file streams and uploads.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import re
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

KEY = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Run:
    """What the server, or an offline file, knows of one run."""

    meta: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, str] = field(default_factory=dict)
    exit: int | None = None
    alerts: list[tuple[str, str, str]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    artifacts: dict[str, list[str]] = field(default_factory=dict)  # type/name -> files

    def values(self, key: str) -> list[Any]:
        return [row[key] for row in self.history if key in row]


class StandIn:
    """Attributes: `runs` by id, `jobs` for an agent to work through, `views` that were saved, `operations` seen, `artifacts`
    (name:alias -> files) to be had, `used` of them."""

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}
        self.jobs: list[dict[str, Any]] = []
        self.sweep_yaml = ""
        self.views: list[dict[str, Any]] = []
        self.operations: list[str] = []
        self.artifacts: dict[str, dict[str, bytes]] = {}
        self.used: list[dict[str, Any]] = []
        self.accepts = True
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                pass

            def body(self) -> bytes:
                raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                return gzip.decompress(raw) if self.headers.get("Content-Encoding") == "gzip" else raw

            def reply(self, answer: Any, code: int = 200) -> None:
                data = json.dumps(answer).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                _, kind, *rest = self.path.split("/")
                if kind != "artifact":
                    return self.reply({})
                name, file = unquote(rest[0]), "/".join(rest[1:])
                data = server.manifest(name) if file == "manifest" else server.artifacts[name][unquote(file)]
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_PUT(self) -> None:
                self.body()
                self.reply({})

            def do_POST(self) -> None:
                body = self.body()
                if not server.accepts:
                    self.reply({"errors": [{"message": "permission denied"}]}, 403)
                elif self.path.endswith("/graphql"):
                    self.reply(server.graphql(json.loads(body)))
                else:
                    stream = re.search(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", self.path)
                    if stream:
                        server.stream(stream[1], json.loads(body))
                    self.reply({})

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._http.handle_error = lambda *args: None  # type: ignore[method-assign]  # a client that hangs up is no news
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> StandIn:
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.die()

    def die(self) -> None:
        """Stop answering; a connection is refused from now on."""
        self._http.shutdown()
        self._http.server_close()

    def environ(self, folder: Path) -> dict[str, str]:
        """An environment with this server and a key, and nothing of the user's own W&B settings."""
        return {**bare_environ(folder), "WANDB_BASE_URL": self.url, "WANDB_API_KEY": KEY}

    def graphql(self, query: dict[str, Any]) -> dict[str, Any]:
        text, given = query.get("query", ""), query.get("variables") or {}
        operation = re.search(r"(?:query|mutation)\s+(\w+)", text)
        self.operations.append(operation[1] if operation else "?")
        for word, answer in (
            ("upsertBucket", self._upsert), ("createRunFiles", self._files), ("RunResumeStatus", self._resume),
            ("createAgent", self._agent), ("agentHeartbeat", self._heartbeat), ("upsertView", self._view),
            ("sweep(", self._sweep), ("useArtifact", self._use), ("artifactCollectionMembership", self._artifact),
            ("currentManifest", self._manifest), ("GetArtifactMembershipFileUrls", self._file_urls),
        ):  # fmt: skip
            if word in text:
                return {"data": answer(given)}
        if "viewer" in text or "serverInfo" in text:
            person = {"id": "VXNlcjo=", "entity": "tester", "username": "tester", "flags": "{}", "teams": {"edges": []}}
            about = {"cliVersionInfo": {}, "latestLocalVersionInfo": None, "features": []}
            return {"data": {"viewer": person, "serverInfo": about}}
        return {"data": {}}

    def _upsert(self, given: dict[str, Any]) -> dict[str, Any]:
        name = given.get("name") or given.get("id") or "run"
        run = self.runs.setdefault(name, Run())
        new = not run.meta
        run.meta.update({key: value for key, value in given.items() if value not in (None, "")})
        if given.get("config"):
            run.config = {key: entry["value"] for key, entry in json.loads(given["config"]).items()}
        project = {"id": "UHJvamVjdDo=", "name": given.get("project") or "p",
                   "entity": {"id": "RW50aXR5Og==", "name": given.get("entity") or "tester"}}  # fmt: skip
        shown = given.get("displayName") or name
        bucket = {"id": "UnVuOg==", "name": name, "displayName": shown, "project": project, "sweepName": None,
                  "historyLineCount": len(run.history), "description": None, "config": None}  # fmt: skip
        return {"upsertBucket": {"inserted": new, "bucket": bucket}}

    def _files(self, given: dict[str, Any]) -> dict[str, Any]:
        files = [{"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in given.get("files", [])]
        return {"createRunFiles": {"runID": "UnVuOg==", "uploadHeaders": [], "files": files}}

    def _resume(self, given: dict[str, Any]) -> dict[str, Any]:
        run, bucket = self.runs.get(given.get("name", "")), None
        if run and run.meta:
            bucket = {
                "id": "UnVuOg==", "name": given["name"], "summaryMetrics": json.dumps(run.summary),
                "displayName": given["name"], "logLineCount": 0, "historyLineCount": len(run.history),
                "eventsLineCount": 0, "historyTail": json.dumps([json.dumps(row) for row in run.history[-1:]]),
                "eventsTail": "[]", "config": json.dumps({k: {"value": v} for k, v in run.config.items()}), "tags": [],
                "wandbConfig": json.dumps({"t": 1}),
            }  # fmt: skip
        return {"model": {"id": "UHJvamVjdDo=", "name": given.get("project"), "bucket": bucket,
                          "entity": {"id": "RW50aXR5Og==", "name": "tester"}}}  # fmt: skip

    def _agent(self, given: dict[str, Any]) -> dict[str, Any]:
        return {"createAgent": {"agent": {"id": "QWdlbnQ6"}}}

    def _heartbeat(self, given: dict[str, Any]) -> dict[str, Any]:
        """One job at a time, then the end."""
        commands = []
        if not json.loads(given.get("runState") or "{}"):
            commands = [self.jobs.pop(0) if self.jobs else {"type": "exit"}]
        return {"agentHeartbeat": {"agent": {"id": "QWdlbnQ6"}, "commands": json.dumps(commands)}}

    def _view(self, given: dict[str, Any]) -> dict[str, Any]:
        self.views.append(given)
        return {"upsertView": {"view": {"id": "Vmlldzo=", "name": given.get("name")}, "inserted": True}}

    def _sweep(self, given: dict[str, Any]) -> dict[str, Any]:
        nothing = dict.fromkeys(("description", "heartbeatAt", "updatedAt", "controller", "scheduler"))
        return {"project": {"sweep": {
            **nothing, "id": "U3dlZXA6", "name": given.get("sweep"), "method": "grid", "state": "RUNNING",
            "config": self.sweep_yaml, "createdAt": "2026-01-01T00:00:00", "earlyStopJobRunning": False,
            "runs": {"edges": []},
        }}}  # fmt: skip

    def _artifact(self, given: dict[str, Any]) -> dict[str, Any]:
        """Of version 3, whatever the alias."""
        name, _, alias = given["name"].partition(":")
        same = [key for key in self.artifacts if key.partition(":")[0] == name and alias in ("v3", key.partition(":")[2])]
        known = same[0] if same else None
        if known is None:
            return {"project": {"artifactCollectionMembership": None}}
        entity = {"name": given["entity"]}
        project = {"id": "UA==", "internalId": "1", "name": given["project"], "entity": entity}
        place = {"__typename": "ArtifactSequence", "name": name, "project": project}
        about: dict[str, Any] = dict.fromkeys(("description", "historyStep", "updatedAt"))
        artifact = {
            **about, "__typename": "Artifact", "id": known, "ttlDurationSeconds": -2, "ttlIsInherited": False,
            "artifactSequence": place, "versionIndex": 3, "tags": [],
            "artifactType": {"name": "model"}, "metadata": "{}", "state": "COMMITTED", "size": 1, "digest": "d",
            "digestAlgorithm": "MANIFEST_MD5", "commitHash": "c", "fileCount": 1, "createdAt": "2026-01-01T00:00:00Z",
            "aliases": [],
        }  # fmt: skip
        return {"project": {"artifactCollectionMembership": {
            "__typename": "ArtifactCollectionMembership", "id": "TQ==", "versionIndex": 3, "createdAt": artifact["createdAt"],
            "aliases": [], "artifactCollection": place, "artifact": artifact,
        }}}  # fmt: skip

    def _manifest(self, given: dict[str, Any]) -> dict[str, Any]:
        return {"artifact": {"currentManifest": {"file": {"directUrl": f"{self.url}/artifact/{quote(given['id'])}/manifest"}}}}

    def manifest(self, name: str) -> bytes:
        entries = {file: {"digest": base64.b64encode(hashlib.md5(data).digest()).decode(), "size": len(data)}
                   for file, data in self.artifacts[name].items()}  # fmt: skip
        return json.dumps({"version": 1, "storagePolicy": "wandb-storage-policy-v1",
                           "storagePolicyConfig": {"storageLayout": "V2"}, "contents": entries}).encode()  # fmt: skip

    def _file_urls(self, given: dict[str, Any]) -> dict[str, Any]:
        name = next(key for key in self.artifacts if key.partition(":")[0] == given["collection"])
        nodes = [{"node": {"__typename": "File", "name": file, "directUrl": f"{self.url}/artifact/{quote(name)}/{quote(file)}"}}
                 for file in self.artifacts[name]]  # fmt: skip
        page = {"__typename": "PageInfo", "endCursor": None, "hasNextPage": False}
        return {"project": {"artifactCollection": {"__typename": "ArtifactSequence", "artifactMembership": {
            "files": {"pageInfo": page, "edges": nodes}}}}}  # fmt: skip

    def _use(self, given: dict[str, Any]) -> dict[str, Any]:
        self.used.append(given)
        return {"useArtifact": {"artifact": {"id": given["artifactID"]}}}

    def stream(self, name: str, body: dict[str, Any]) -> None:
        run = self.runs.setdefault(name, Run())
        for file, chunk in (body.get("files") or {}).items():
            if file.endswith("history.jsonl"):
                run.history += [json.loads(line) for line in chunk["content"]]
            elif file.endswith("summary.json"):
                run.summary = json.loads(chunk["content"][-1])
        if body.get("complete"):
            run.exit = body.get("exitcode")


def bare_environ(folder: Path) -> dict[str, str]:
    """This environment without W&B's variables and with a home folder of its own, so that no key is found."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    return {**kept, "HOME": str(folder), "NETRC": str(folder / "netrc"), "OMP_NUM_THREADS": "1"}


def offline_files(folder: Path) -> list[Path]:
    """Every run file below `folder`. Files and not folders are counted: a stray init leaves a folder without one."""
    return sorted(folder.rglob("*.wandb"))


def read_offline(file: Path) -> Run:
    """An offline run, read with wandb's own record types."""
    run = Run()
    for record in _records(file.read_bytes()):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            names = ("run_id", "project", "entity", "run_group", "job_type", "display_name", "notes", "sweep_id")
            run.meta = {name: getattr(record.run, name) for name in names} | {"tags": list(record.run.tags)}
            run.config.update(_items(record.run.config.update))
        elif kind == "config":
            run.config.update(_items(record.config.update))
        elif kind == "history":
            run.history.append(_items(record.history.item))
        elif kind == "summary":
            run.summary.update(_items(record.summary.update))
        elif kind == "metric":
            run.axes[record.metric.name or record.metric.glob_name] = record.metric.step_metric
        elif kind == "alert":
            run.alerts.append((record.alert.title, record.alert.text, record.alert.level))
        elif kind == "files":
            run.files += [file.path for file in record.files.files]
        elif kind == "artifact":
            made = record.artifact
            run.artifacts[f"{made.type}/{made.name}"] = [entry.path for entry in made.manifest.contents]
        elif kind == "exit":
            run.exit = record.exit.exit_code
    return run


def _records(data: bytes) -> Iterator[Any]:
    """The file is a LevelDB log: a 7-byte head, then blocks of 32 KiB of (checksum, length, kind) records."""
    from wandb.proto import wandb_internal_pb2

    place, joined, block, head = 7, b"", 32768, 7
    while place + head <= len(data):
        room = block - place % block
        if room < head:
            place += room
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + head])
        if kind == 0:  # padding
            place += room
            continue
        joined += data[place + head : place + head + size]
        place += head + size
        if kind in (1, 4):  # a whole record, or the last piece of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(joined)
            joined = b""
            yield record


def _items(items: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in items:
        *parents, last = list(item.nested_key) or [item.key]
        node = found
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = json.loads(item.value_json)
    return found
