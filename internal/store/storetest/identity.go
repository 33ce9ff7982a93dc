package storetest

import (
	"errors"
	"testing"
	"time"

	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/iam/role"
	"github.com/kernflux/opendsec/internal/sandbox"
	"github.com/kernflux/opendsec/internal/store"
)

func testNodes(t *testing.T, db *store.DB) {
	nodes(t, db, "n2", "n1")
	if err := db.SetDrained(t.Context(), "n2", true); err != nil {
		t.Fatal(err)
	}
	seen := start.Add(5 * time.Second)
	if err := db.PutNode(t.Context(), store.Node{Name: "n2", Address: "https://new", Report: []byte(`{"a":1}`), LastSeen: seen}); err != nil {
		t.Fatal(err)
	}
	all, err := db.ListNodes(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	diff(t, "nodes", all, []store.Node{
		{Name: "n1", Address: "https://n1", Report: []byte(`{}`), LastSeen: start},
		{Name: "n2", Address: "https://new", Report: []byte(`{"a":1}`), LastSeen: seen, Drained: true},
	})
	wantKind(t, db.SetDrained(t.Context(), "n3", true), fault.NotFound, "node")
}

func testImages(t *testing.T, db *store.DB) {
	ctx := t.Context()
	image := func(project sandbox.Project, repo, tag, digest string) store.Image {
		return store.Image{
			Name:   sandbox.ImageName{Project: project, Repo: repo, Tag: tag},
			Digest: digest, Kind: "oci", Size: 1 << 40, Architecture: "amd64", Source: "docker.io/x", Config: []byte(`{"env":["A=b"]}`), CreatedAt: start,
		}
	}
	py, demo := image("root", "py", "latest", "sha256:aa"), image("root/demo", "app", "1", "sha256:bb")
	demo.Kind, demo.Snapshot = "memory", []byte(`{"backend":"gvisor"}`)
	demo.Network = &store.ImageNetwork{Project: "root/demo", Rules: map[string]bool{"pypi": true, "*": false}}
	for _, m := range []store.Image{py, demo, image("root/other", "app", "1", "sha256:aa")} {
		if before, err := db.PutImage(ctx, m); err != nil || before != nil {
			t.Fatalf("a new name had %v, %v", before, err)
		}
	}
	_, err := db.PutImage(ctx, image("root/nobody", "x", "1", "sha256:aa"))
	wantKind(t, err, fault.NotFound, "project")
	got, err := db.GetImage(ctx, py.Name)
	if err != nil {
		t.Fatal(err)
	}
	diff(t, "an image", got, py)
	visible, err := db.ListImages(ctx, sandbox.Project("root/demo").Lineage()...)
	if err != nil {
		t.Fatal(err)
	}
	diff(t, "images visible in root/demo", visible, []store.Image{py, demo})
	if all, err := db.ListImages(ctx); err != nil || len(all) != 3 {
		t.Errorf("all images: %v, %v", all, err)
	}
	create(t, db, Sandbox("root/demo")) // of sha256:aa
	use, err := db.CountDigest(ctx, "sha256:aa")
	if err != nil {
		t.Fatal(err)
	}
	diff(t, "users of a digest", use, store.DigestUse{Names: 2, Sandboxes: 1})

	moved := py
	moved.Digest, moved.Kind, moved.Snapshot = "sha256:cc", "memory", []byte(`{"runtime":"1"}`)
	moved.Network = &store.ImageNetwork{Project: "root/demo"}
	before, err := db.PutImage(ctx, moved)
	if err != nil {
		t.Fatal(err)
	}
	diff(t, "what the name meant before", before, &py)
	deleted, err := db.DeleteImage(ctx, py.Name)
	if err != nil {
		t.Fatal(err)
	}
	diff(t, "a deleted image", deleted, moved)
	_, err = db.DeleteImage(ctx, py.Name)
	wantKind(t, err, fault.NotFound, "")
	_, err = db.GetImage(ctx, py.Name)
	wantKind(t, err, fault.NotFound, "")
}

func try(t *testing.T, db *store.DB, do func(*store.Change) error) error {
	t.Helper()
	return db.Change(t.Context(), store.Audit{Time: start, Caller: "test", Action: "Try"}, do)
}

func testProjects(t *testing.T, db *store.DB) {
	ctx := t.Context()
	add := func(p sandbox.Project) error {
		return try(t, db, func(c *store.Change) error { return c.CreateProject(ctx, store.Project{Path: p, CreatedAt: start}) })
	}
	wantKind(t, add("root/demo"), fault.AlreadyExists, "")
	wantKind(t, add("root/nobody/a"), fault.NotFound, "project")
	if err := add("root/demo_x"); err != nil { // not below root/demo
		t.Fatal(err)
	}
	sandboxes, cpu := int64(3), 0.5
	quota := store.Quota{Sandboxes: &sandboxes, CPU: &cpu}
	Change(t, db, func(c *store.Change) error {
		p, err := c.SetQuota(ctx, "root/demo", quota)
		diff(t, "the new quota", p.Quota, quota)
		return err
	})
	// A place sees the project and those above it, with their quotas.
	_, err := db.CreateSandbox(ctx, Sandbox("root/demo/a"), store.Idempotency{},
		func(_ *sandbox.Sandbox, _ []store.NodeUsage, projects []store.ProjectUsage) (string, error) {
			var paths []sandbox.Project
			for _, p := range projects {
				paths = append(paths, p.Project.Path)
			}
			diff(t, "lineage", paths, []sandbox.Project{"root/demo/a", "root/demo", "root"})
			diff(t, "quota in the lineage", projects[1].Project.Quota, quota)
			return "", store.ErrLeaveOut
		})
	if err != nil {
		t.Fatal(err)
	}
	_, err = db.CreateSandbox(ctx, Sandbox("root/demo/b"), store.Idempotency{}, On("n1"))
	wantKind(t, err, fault.NotFound, "project")

	remove := func(p sandbox.Project) error {
		return try(t, db, func(c *store.Change) error { return c.DeleteProject(ctx, p) })
	}
	wantKind(t, remove("root/demo"), fault.WrongState, "") // has root/demo/a
	sb := create(t, db, Sandbox("root/demo/a"))
	wantKind(t, remove("root/demo/a"), fault.WrongState, "")
	use, err := db.CountProject(ctx, "root/demo")
	if err != nil {
		t.Fatal(err)
	}
	diff(t, "what is in root/demo", use, store.ProjectUse{Projects: 1})
	update(t, db, sb.ID, func(sb *sandbox.Sandbox) {
		sb.State, sb.End = sandbox.Stopped, &sandbox.End{Reason: "stopped", Domain: sandbox.User, Time: start}
	})
	for _, p := range []sandbox.Project{"root/demo/a", "root/demo"} {
		if err := remove(p); err != nil {
			t.Error(err)
		}
	}
	wantKind(t, remove("root/demo"), fault.NotFound, "project")
	_, err = db.GetSandbox(ctx, sb.ID)
	wantKind(t, err, fault.NotFound, "")
	_, err = db.CreateSandbox(ctx, Sandbox("root/demo"), store.Idempotency{}, On("n1"))
	wantKind(t, err, fault.NotFound, "project")
	if err := add("root/demo"); err != nil {
		t.Error(err)
	}
}

func testCallers(t *testing.T, db *store.DB) {
	ctx := t.Context()
	ann := store.Caller{Name: "ann", CreatedAt: start, Grants: []role.Grant{{Project: "root", Role: role.Admin}}}
	bob := store.Caller{Name: "bob", CreatedAt: start, Grants: []role.Grant{
		{Project: "root/demo", Role: role.Developer}, {Project: "root/other", Role: role.Viewer},
	}}
	Change(t, db, func(c *store.Change) error { return errors.Join(c.CreateCaller(ctx, ann), c.CreateCaller(ctx, bob)) })
	wantKind(t, try(t, db, func(c *store.Change) error { return c.CreateCaller(ctx, bob) }), fault.AlreadyExists, "")
	wantKind(t, try(t, db, func(c *store.Change) error {
		return c.CreateCaller(ctx, store.Caller{Name: "eve", Grants: []role.Grant{{Project: "root/nobody", Role: role.Viewer}}})
	}), fault.NotFound, "project")
	all, err := db.ListCallers(ctx)
	if err != nil {
		t.Fatal(err)
	}
	diff(t, "callers", all, []store.Caller{ann, bob})

	Change(t, db, func(c *store.Change) error {
		got, err := c.SetGrant(ctx, "bob", role.Grant{Project: "root/demo", Role: role.Viewer})
		diff(t, "a changed role", got.Grants[0].Role, role.Viewer)
		return err
	})
	Change(t, db, func(c *store.Change) error {
		_, err := c.SetGrant(ctx, "bob", role.Grant{Project: "root/demo"})
		return err
	})
	got, err := db.GetCaller(ctx, "bob")
	if err != nil {
		t.Fatal(err)
	}
	diff(t, "what is left to bob", got.Grants, bob.Grants[1:])
	wantKind(t, try(t, db, func(c *store.Change) error {
		_, err := c.SetGrant(ctx, "eve", role.Grant{Project: "root", Role: role.Viewer})
		return err
	}), fault.NotFound, "caller")

	// Rights on a project end with it: a new one of the same path is another.
	Change(t, db, func(c *store.Change) error { return c.DeleteProject(ctx, "root/other") })
	Projects(t, db, "root/other")
	if got, err = db.GetCaller(ctx, "bob"); err != nil || len(got.Grants) != 0 {
		t.Errorf("bob has %v after the project's end, %v", got.Grants, err)
	}
	Change(t, db, func(c *store.Change) error { return c.DeleteCaller(ctx, "bob") })
	wantKind(t, try(t, db, func(c *store.Change) error { return c.DeleteCaller(ctx, "bob") }), fault.NotFound, "caller")
}

func testLastAdmin(t *testing.T, db *store.DB) {
	ctx := t.Context()
	admin := []role.Grant{{Project: "root", Role: role.Admin}}
	Change(t, db, func(c *store.Change) error {
		return c.CreateCaller(ctx, store.Caller{Name: "ann", Grants: admin, CreatedAt: start})
	})
	takeAway := func(name string, r role.Role) error {
		return try(t, db, func(c *store.Change) error {
			_, err := c.SetGrant(ctx, name, role.Grant{Project: "root", Role: r})
			return err
		})
	}
	remove := func(name string) error {
		return try(t, db, func(c *store.Change) error { return c.DeleteCaller(ctx, name) })
	}
	wantKind(t, remove("ann"), fault.WrongState, "")
	wantKind(t, takeAway("ann", ""), fault.WrongState, "")
	wantKind(t, takeAway("ann", role.Developer), fault.WrongState, "")
	Change(t, db, func(c *store.Change) error {
		return c.CreateCaller(ctx, store.Caller{Name: "bob", Grants: admin, CreatedAt: start})
	})
	// Both at once: one of them must stay.
	errs := make([]error, 2)
	atOnce(2, func(i int) { errs[i] = remove([]string{"ann", "bob"}[i]) })
	if (errs[0] == nil) == (errs[1] == nil) {
		t.Errorf("two last admins deleted at once: %v, %v; want one to stay", errs[0], errs[1])
	}
}

func testTokens(t *testing.T, db *store.DB) {
	ctx := t.Context()
	Change(t, db, func(c *store.Change) error { return c.CreateCaller(ctx, store.Caller{Name: "ann", CreatedAt: start}) })
	first := store.Token{ID: "aaaaaaaaaaaa", Caller: "ann", Hash: []byte{0, 1, 255}, Description: "d", CreatedAt: start}
	second := store.Token{ID: "bbbbbbbbbbbb", Caller: "ann", Hash: []byte{2}, CreatedAt: start.Add(time.Second), ExpiresAt: start.Add(time.Hour)}
	Change(t, db, func(c *store.Change) error { return errors.Join(c.CreateToken(ctx, first), c.CreateToken(ctx, second)) })
	wantKind(t, try(t, db, func(c *store.Change) error {
		return c.CreateToken(ctx, store.Token{ID: "cccccccccccc", Caller: "eve", CreatedAt: start})
	}), fault.NotFound, "caller")
	got, err := db.GetToken(ctx, first.ID)
	if err != nil {
		t.Fatal(err)
	}
	diff(t, "a token", got, first)
	all, err := db.ListTokens(ctx, "ann")
	if err != nil {
		t.Fatal(err)
	}
	diff(t, "tokens", all, []store.Token{second, first})
	Change(t, db, func(c *store.Change) error {
		for now, want := range map[time.Time]int64{start: 2, start.Add(time.Hour): 1} {
			if n, err := c.CountTokens(ctx, "ann", now); err != nil || n != want {
				t.Errorf("%d tokens at %v, %v; want %d", n, now, err, want)
			}
		}
		return nil
	})
	for _, at := range []time.Duration{time.Minute, time.Hour} { // the second changes nothing
		Change(t, db, func(c *store.Change) error { return c.RevokeToken(ctx, first.ID, start.Add(at)) })
	}
	if got, err = db.GetToken(ctx, first.ID); err != nil || !got.RevokedAt.Equal(start.Add(time.Minute)) {
		t.Errorf("revoked at %v, %v; want %v", got.RevokedAt, err, start.Add(time.Minute))
	}
	if all, err = db.ListTokens(ctx, "ann"); err != nil || len(all) != 1 {
		t.Errorf("%d tokens after a revocation, %v; want 1", len(all), err)
	}
	wantKind(t, try(t, db, func(c *store.Change) error { return c.RevokeToken(ctx, "dddddddddddd", start) }), fault.NotFound, "id")
	Change(t, db, func(c *store.Change) error { return c.DeleteCaller(ctx, "ann") })
	_, err = db.GetToken(ctx, second.ID)
	wantKind(t, err, fault.NotFound, "id")
}

func testChange(t *testing.T, db *store.DB) {
	ctx := t.Context()
	audit := func(action string, at time.Duration) store.Audit {
		return store.Audit{Time: start.Add(at), Caller: "ann", TokenID: "aaaaaaaaaaaa", Action: action, Subject: "root/new"}
	}
	refused := fault.New(fault.PermissionDenied, "no")
	err := db.Change(ctx, audit("First", 0), func(c *store.Change) error {
		if err := c.CreateProject(ctx, store.Project{Path: "root/new", CreatedAt: start}); err != nil {
			return err
		}
		return refused
	})
	if !errors.Is(err, refused) {
		t.Errorf("got %v, want the change's own error", err)
	}
	_, err = db.GetProject(ctx, "root/new")
	wantKind(t, err, fault.NotFound, "project")
	err = db.Change(ctx, audit("Second", time.Second), func(c *store.Change) error {
		return c.CreateProject(ctx, store.Project{Path: "root/new", CreatedAt: start})
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := db.AddAudit(ctx, audit("Third", 2*time.Second)); err != nil {
		t.Fatal(err)
	}
	first, second, third := audit("First", 0), audit("Second", time.Second), audit("Third", 2*time.Second)
	first.Outcome, second.Outcome = "permission_denied", "done"
	got, err := db.ListAudit(ctx, start.Add(time.Minute), 3)
	if err != nil {
		t.Fatal(err)
	}
	diff(t, "the audit log", got, []store.Audit{third, second, first})
	if got, err = db.ListAudit(ctx, second.Time, 1); err != nil || len(got) != 1 {
		t.Fatal(got, err)
	}
	diff(t, "the audit log before the second", got[0], first)
}
