from __future__ import annotations

import asyncio
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import trustme
from fake import PROJECT, TOKEN, Server

import opendsec
from opendsec import DSecClient, DSecRunArgs, Sandbox, SandboxState

ARGS = DSecRunArgs(image="root/py:latest", backend="gvisor")


def test_environment_is_read(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ca.pem").write_bytes(server.ca)
    for name, value in (
        ("ADDR", server.addr),
        ("TOKEN", TOKEN),
        ("PROJECT", PROJECT),
        ("CA", str(tmp_path / "ca.pem")),
    ):
        monkeypatch.setenv(f"OPENDSEC_{name}", value)

    async def main() -> None:
        client = DSecClient()
        async with await client.run_sandbox(ARGS) as sb:
            assert (sb.backend, sb.image, sb.project, sb.node) == ("gvisor", "root/py:latest", PROJECT, "n1")
            assert sb.state.value == sb.state == "RUNNING"
            assert f"{sb.state}" == str(sb.state) == "RUNNING"
            assert sb.created_at is not None
            assert sb.created_at.tzinfo is not None
            assert sb.end is None
            assert TOKEN not in repr(client) + repr(sb) + repr(vars(client))
        assert sb.state is SandboxState.STOPPED
        assert sb.end is not None
        assert sb.end.reason == "stopped"
        await sb.stop()
        await client.close()
        with pytest.raises(opendsec.ConnectionError, match="this client is closed"):
            await sb.run_shell("true")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("arguments", "field"),
    [({"addr": ""}, "addr"), ({"addr": "host:1"}, "addr"), ({"addr": "http://example.org:1"}, "addr"),
     ({"addr": "https://h:x"}, "addr"), ({"token": ""}, "token"), ({"token": "a b"}, "token"),
     ({"project": ""}, "project"), ({"ca": "/no/such/file"}, "ca"), ({"timeout": -1}, "timeout")],
)  # fmt: skip
def test_wrong_client_arguments_are_named(
    arguments: dict[str, Any], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ADDR", "TOKEN", "PROJECT", "CA"):
        monkeypatch.delenv(f"OPENDSEC_{name}", raising=False)
    good: dict[str, Any] = {"addr": "https://127.0.0.1:1", "token": TOKEN, "project": PROJECT}
    with pytest.raises(opendsec.InvalidArgumentError) as caught:
        DSecClient(**{**good, **arguments})
    assert caught.value.field == field
    assert field in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [({"image": "py"}, "image"), ({"image": ""}, "image"), ({"backend": ""}, "backend"),
     ({"cpu_cores_limit": 0}, "cpu_cores_limit"), ({"cpu_cores_limit": float("nan")}, "cpu_cores_limit"),
     ({"memory_limit_mb": 1}, "memory_limit_mb"), ({"memory_limit_mb": 512.5}, "memory_limit_mb"),
     ({"memory_limit_mb": 2**80}, "memory_limit_mb"), ({"disk_limit_mb": 0}, "disk_limit_mb"),
     ({"pids_limit": True}, "pids_limit"), ({"ttl_running_stop": 0}, "ttl_running_stop"),
     ({"ttl_lifetime": -1}, "ttl_lifetime"), ({"network_rules": {"pypi": 1}}, "network_rules"),
     ({"network_rules": ["pypi"]}, "network_rules"), ({"env": {"": "x"}}, "env"), ({"workdir": "rel"}, "workdir"),
     ({"user": ""}, "user"), ({"hostname": "-x"}, "hostname"), ({"labels": {"A": "x"}}, "labels"),
     ({"labels": {"a": "x" * 256}}, "labels"), ({"on_idle": "sleep"}, "on_idle"), ({"auto_resume": 1}, "auto_resume"),
     ({"metadata": {"a": "x" * 20000}}, "metadata")],
)  # fmt: skip
def test_wrong_run_arguments_are_named(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(opendsec.InvalidArgumentError) as caught:
        DSecRunArgs(**{"image": "root/py", **arguments})
    assert caught.value.field == field
    assert str(caught.value).startswith(field + ": ")


def test_all_run_arguments_are_sent(server: Server, use: Any) -> None:
    async def work(client: DSecClient, _: Sandbox) -> None:
        args = DSecRunArgs(
            image="root/py:1", backend="container", cpu_cores_limit=0.5, memory_limit_mb=1024, disk_limit_mb=64,
            pids_limit=99, ttl_running_stop=600, ttl_lifetime=0.25, network_rules={"pypi": True}, env={"A": "b"},
            workdir="/w", user="u", hostname="h.x", labels={"task": "t"}, auto_resume=True, metadata={"m": "n"},
        )  # fmt: skip
        assert "A" not in repr(args).replace("DSecRunArgs", "")
        sb = await client.run_sandbox(args)
        spec = server.sandboxes[sb.id].record.spec
        assert spec is not None
        assert (spec.image, spec.backend, spec.cpu_cores_limit, spec.memory_limit_mb) == (
            "root/py:1",
            "container",
            0.5,
            1024,
        )
        assert (spec.disk_limit_mb, spec.pids_limit, spec.workdir, spec.user, spec.hostname) == (
            64,
            99,
            "/w",
            "u",
            "h.x",
        )
        assert spec.ttl_running_stop is not None
        assert spec.ttl_lifetime is not None
        assert (spec.ttl_running_stop.to_seconds(), spec.ttl_lifetime.to_seconds()) == (600, 0.25)
        assert (spec.env, spec.labels, spec.metadata) == ({"A": "b"}, {"task": "t"}, {"m": "n"})
        assert spec.network_rules is not None
        assert spec.network_rules.rules == {"pypi": True} == sb.network_rules
        assert spec.auto_resume
        assert (sb.labels, sb.metadata) == ({"task": "t"}, {"m": "n"})

    use(work)


def test_repeats(server: Server, use: Any) -> None:
    async def work(client: DSecClient, first: Sandbox) -> None:
        a = await client.run_sandbox(ARGS, idempotency_key="k")
        b = await client.run_sandbox(ARGS, idempotency_key="k")
        assert a.id == b.id != first.id
        server.refuse = 4  # the call repeats itself, with one key of its own
        assert (await client.run_sandbox(ARGS)).id not in (a.id, first.id)
        assert len(server.sandboxes) == 3

    use(work)


def test_several(use: Any) -> None:
    async def work(client: DSecClient, _: Sandbox) -> None:
        made = await client.run_sandboxes(ARGS, count=5)
        assert len({sb.id for sb in made}) == 5
        assert made.errors == []
        some = await client.run_sandboxes(ARGS, count=3, all_or_none=False)
        assert len(some) == 2
        assert [type(e) for e in some.errors] == [opendsec.CapacityError]
        with pytest.raises(opendsec.CapacityError):
            await client.run_sandboxes(ARGS, count=1, all_or_none=False)
        with pytest.raises(opendsec.InvalidArgumentError, match="count"):
            await client.run_sandboxes(ARGS, count=0)

    use(work)


def test_get_and_list(server: Server, use: Any) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        same = await client.get(sb.id)
        assert (await same.run_shell("echo hi")).stdout == "hi\n"
        others = await client.run_sandboxes(DSecRunArgs("root/py", labels={"task": "t"}), count=4)
        assert [s.id async for s in client.list()] == [sb.id, *(o.id for o in others)]
        assert [s.id async for s in client.list(labels={"task": "t"})] == [o.id for o in others]
        await others[0].stop()
        assert [s.id async for s in client.list(labels={"task": "t"}, state="running")] == [
            o.id for o in others[1:]
        ]
        assert others[0].id in [s.id async for s in client.list(ended=True)]
        assert [s async for s in client.list(state=[SandboxState.PAUSED, "failed"])] == []
        with pytest.raises(opendsec.InvalidArgumentError, match="'going' is not a state"):
            [s async for s in client.list(state="going")]

    use(work)


@pytest.mark.parametrize(
    ("args", "kind", "attributes"),
    [(DSecRunArgs("root/none:latest"), opendsec.NotFoundError, {"request_id": "req-1"}),
     (DSecRunArgs("root/py", backend="nonsense"), opendsec.InvalidArgumentError, {"field": "backend"}),
     (DSecRunArgs("root/py", on_idle="pause"), opendsec.UnsupportedError, {"backends": ("gvisor", "microvm")}),
     (DSecRunArgs("root/py", memory_limit_mb=2 * 10**6), opendsec.CapacityError,
      {"retryable": True, "domain": opendsec.Domain.INFRA})],
)  # fmt: skip
def test_errors_are_typed(
    use: Any, args: DSecRunArgs, kind: type[Exception], attributes: dict[str, Any]
) -> None:
    async def work(client: DSecClient, _: Sandbox) -> None:
        with pytest.raises(kind) as caught:
            await client.run_sandbox(args)
        assert {name: getattr(caught.value, name) for name in attributes} == attributes
        assert isinstance(caught.value, opendsec.DSecError)
        assert "\n" not in str(caught.value)

    use(work)


def test_strangers_are_refused(server: Server) -> None:
    async def main() -> None:
        async with DSecClient(server.addr, "ods_wrong_secret", PROJECT, server.ca) as client:
            with pytest.raises(opendsec.UnauthenticatedError, match="this token is not known") as caught:
                await client.run_sandbox(ARGS)
            assert "ods_wrong" not in str(caught.value)
        other = trustme.CA().cert_pem.bytes()
        async with DSecClient(server.addr, TOKEN, PROJECT, other) as client:
            with pytest.raises(opendsec.ConnectionError, match=r"is not trusted: .*OPENDSEC_CA") as untrusted:
                await client.get("sb-000000000000")
            assert isinstance(untrusted.value, ConnectionError)
        async with DSecClient("https://127.0.0.1:9", TOKEN, PROJECT, other) as client:
            with pytest.raises(opendsec.ConnectionError, match="cannot reach https://127.0.0.1:9"):
                await client.get("sb-000000000000")

    asyncio.run(main())


def test_network(server: Server, use: Any) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        await sb.update_network({"example.com": True, "*:25": False})
        spec = server.sandboxes[sb.id].record.spec
        assert spec is not None
        assert spec.network_rules is not None
        assert spec.network_rules.rules == {"example.com": True, "*:25": False} == sb.network_rules
        allowed, denied = await sb.explain_network("example.com"), await sb.explain_network("example.org")
        assert (bool(allowed), allowed.rule, allowed.why) == (True, "example.com", "because")
        assert (bool(denied), denied.rule) == (False, None)
        for rules in ({"example.com": 1}, {"": True}, {5: True}, ["example.com"], {"wrong": True}):
            with pytest.raises(opendsec.InvalidArgumentError) as wrong:
                await sb.update_network(rules)  # type: ignore[arg-type]
            assert wrong.value.field == "network_rules"
        for target in (5, None):
            with pytest.raises(opendsec.InvalidArgumentError) as wrong:
                await sb.explain_network(target)  # type: ignore[arg-type]
            assert wrong.value.field == "target"
        first, second = await sb.denied_egress()
        assert (first.kind, first.count, first.name, first.address, first.port) == (
            "name",
            2,
            "example.com",
            None,
            None,
        )
        assert (second.name, second.address, second.port, second.protocol) == (None, "192.0.2.1", 443, "tcp")

    use(work)


def test_deadlines_refresh_metrics(server: Server, use: Any) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        await sb.set_ttl(ttl_running_stop=5, ttl_lifetime=60)
        await sb.set_ttl(ttl_running_stop=None)
        spec = server.sandboxes[sb.id].record.spec
        assert spec is not None
        assert spec.ttl_running_stop is not None
        assert spec.ttl_lifetime is not None
        assert (spec.ttl_running_stop.to_seconds(), spec.ttl_lifetime.to_seconds()) == (0, 60)
        with pytest.raises(opendsec.InvalidArgumentError):
            await sb.set_ttl()
        m = await sb.metrics()
        assert (m.cpu_seconds, m.memory_bytes, m.pids, m.shared_memory_bytes) == (1.5, 1 << 20, 3, 5)
        server.end(sb.id, "lost")
        await sb.refresh()
        assert sb.state is SandboxState.FAILED
        assert sb.end is not None
        assert (sb.end.reason, sb.end.domain) == ("lost", "infra")
        with pytest.raises(opendsec.SandboxEndedError):
            await sb.write_file("/x", "y")
        with pytest.raises(opendsec.SandboxEndedError):
            await sb.exists("/x")
        await sb.stop()
        del server.sandboxes[sb.id]
        await sb.stop()
        with pytest.raises(opendsec.NotFoundError):
            await sb.exists("/x")

    use(work)


def test_warnings_are_shown_where_the_caller_is(server: Server, use: Any) -> None:
    async def work(client: DSecClient, _: Sandbox) -> None:
        server.warnings = ["network rules are kept but not in force yet"]
        with pytest.warns(opendsec.DSecWarning, match="not in force") as caught:
            sb = await client.run_sandbox(ARGS)
        assert sb.warnings == ("network rules are kept but not in force yet",)
        assert caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            await client.get(sb.id)

    use(work)


def test_images(use: Any) -> None:
    async def work(client: DSecClient, _: Sandbox) -> None:
        assert [i.name for i in await client.images.list()] == ["root/py:latest"]
        assert (await client.images.get("root/py:latest")).digest == "sha256:1"
        with pytest.raises(opendsec.NotFoundError):
            await client.images.get("root/nope:1")
        await client.images.delete("root/py:latest")
        steps: list[str] = []
        made = await client.images.import_image("oci:/x", "root/x:1", progress=lambda p: steps.append(p.step))
        assert (made.name, steps) == ("root/x:1", ["pull", "done"])

    use(work)


def test_a_cancelled_call_is_cancelled(use: Any) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        task = asyncio.ensure_future(client.get(sb.id))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    use(work)


def test_errors_can_be_pickled() -> None:
    end = opendsec.End("idle", opendsec.Domain.POLICY, "it was idle")
    err = opendsec.SandboxEndedError("it ended", request_id="r", domain=end.domain)
    err.end = end
    back = pickle.loads(pickle.dumps(err))
    assert (type(back), str(back), back.request_id, back.end) == (
        opendsec.SandboxEndedError,
        "it ended",
        "r",
        end,
    )
    shell = opendsec.ShellError("failed", opendsec.ShellResult("o", "e", 1))
    assert pickle.loads(pickle.dumps(shell)).result.stdout == "o"
    timed: opendsec.TimeoutError = pickle.loads(pickle.dumps(opendsec.TimeoutError("late", retryable=True)))
    assert issubclass(type(timed), TimeoutError)
    assert timed.retryable
