package apiserver_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/api/gen/opendsec/v1/opendsecv1connect"
	"github.com/kernflux/opendsec/internal/apiserver"
	"github.com/kernflux/opendsec/internal/ca"
	"github.com/kernflux/opendsec/internal/daemon"
	"github.com/kernflux/opendsec/internal/edgetest"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/iam"
	"github.com/kernflux/opendsec/internal/iam/role"
	"github.com/kernflux/opendsec/internal/iam/token"
	"github.com/kernflux/opendsec/internal/mtls"
	"github.com/kernflux/opendsec/internal/sandbox"
	"github.com/kernflux/opendsec/internal/store"
	"github.com/kernflux/opendsec/internal/watcher"
)

// cluster is an API over TLS with the real store, iam and watcher behind it,
// and small edges.
type cluster struct {
	t      *testing.T
	db     *store.DB
	ca     *ca.CA
	dir    string // of certificates
	edges  []*edgetest.Edge
	iam    string // its address
	url    string
	http   *http.Client
	ahead  atomic.Int64 // of the time, by the API's clock
	domain string       // of the APIs that are run
}

// Images that each cluster has.
const (
	rootImage  = "root/py:latest"
	otherImage = "root/other/own:1"
)

func newCluster(t *testing.T, nodes int) *cluster {
	t.Helper()
	c := newRecords(t)
	var watched []watcher.Node
	for i := range nodes {
		e := edgetest.Start(t, c.dir, fmt.Sprintf("node-%d", i+1))
		c.edges = append(c.edges, e)
		watched = append(watched, watcher.Node{Name: e.Name, Address: e.Address()})
	}
	c.start(watched)
	return c
}

// newRecords makes the certificates and the records of a cluster.
func newRecords(t *testing.T) *cluster {
	t.Helper()
	dir := t.TempDir()
	authority, err := ca.Init(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range []string{mtls.RoleAPIServer, mtls.RoleIAM, mtls.RoleWatcher, mtls.RoleEdge} {
		if err := authority.Ensure(r, []string{"127.0.0.1"}); err != nil {
			t.Fatal(err)
		}
	}
	db, err := store.Open(t.Context(), "sqlite:"+filepath.Join(dir, "records.db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	})
	c := &cluster{t: t, db: db, ca: authority, dir: dir}
	c.fill()
	return c
}

// start runs iam, the watcher and the API over the nodes.
func (c *cluster) start(nodes []watcher.Node) {
	c.t.Helper()
	log := slog.New(slog.DiscardHandler)
	iamID := c.identity(mtls.RoleIAM)
	iamAddress := c.serve(iamID.ServerConfig(), iam.New(iam.Config{}, c.db, log).Handler())
	watchID := c.identity(mtls.RoleWatcher)
	c.run(func(ctx context.Context) error {
		return watcher.New(watcher.Config{Nodes: nodes}, watcher.Deps{
			DB: c.db, Edge: c.client(watchID.ClientConfig(mtls.RoleEdge)), Log: log,
		}).Run(ctx)
	})
	c.iam = iamAddress
	c.url = c.api()
	c.http = c.client(&tls.Config{RootCAs: c.roots()})
	c.waitHealthy(len(nodes))
}

// api runs an API, which may be one of several, and returns its URL.
func (c *cluster) api() string {
	c.t.Helper()
	id := c.identity(mtls.RoleAPIServer)
	api := apiserver.New(apiserver.Config{IAMAddress: c.iam, Domain: c.domain, Version: "test", StopTimeout: 2 * time.Second}, apiserver.Deps{
		DB: c.db, IAM: c.client(id.ClientConfig(mtls.RoleIAM)), Edge: c.client(id.ClientConfig(mtls.RoleEdge)),
		Log: slog.New(slog.DiscardHandler), Now: func() time.Time { return time.Now().Add(time.Duration(c.ahead.Load())) },
	})
	return "https://" + c.serve(id.PublicConfig(), api.Handler())
}

// fill records the projects, callers and images that tests use.
func (c *cluster) fill() {
	c.t.Helper()
	now := time.Now()
	if _, err := iam.Bootstrap(c.t.Context(), c.db, iam.Names{}, nil); err != nil {
		c.t.Fatal(err)
	}
	err := c.db.Change(c.t.Context(), store.Audit{Time: now, Action: "test"}, func(ch *store.Change) error {
		return ch.CreateProject(c.t.Context(), store.Project{Path: "root/other", CreatedAt: now})
	})
	if err != nil {
		c.t.Fatal(err)
	}
	for _, name := range []string{rootImage, otherImage} {
		n, err := sandbox.ParseImageName(name)
		if err != nil {
			c.t.Fatal(err)
		}
		_, err = c.db.PutImage(c.t.Context(), store.Image{Name: n, Digest: edgetest.Digest(name), Kind: "oci", Config: []byte(`{}`), CreatedAt: now})
		if err != nil {
			c.t.Fatal(err)
		}
	}
}

func (c *cluster) identity(r string) *mtls.Identity {
	c.t.Helper()
	id, err := mtls.Load(c.dir, r)
	if err != nil {
		c.t.Fatal(err)
	}
	return id
}

// roots returns the authority that the cluster's servers are known by.
func (c *cluster) roots() *x509.CertPool {
	c.t.Helper()
	pem, err := os.ReadFile(c.ca.CertFile())
	if err != nil {
		c.t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(pem)
	return pool
}

func (c *cluster) client(cfg *tls.Config) *http.Client {
	client := daemon.Client(cfg)
	c.t.Cleanup(client.CloseIdleConnections)
	return client
}

// run runs something until the test ends.
func (c *cluster) run(f func(context.Context) error) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(c.t.Context()))
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	c.t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			c.t.Error(err)
		}
	})
}

func (c *cluster) serve(cfg *tls.Config, h http.Handler) string {
	c.t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		c.t.Fatal(err)
	}
	c.run(func(ctx context.Context) error {
		return daemon.Serve(ctx, daemon.Server{Listener: l, TLS: cfg, Handler: h, Log: slog.New(slog.DiscardHandler), Grace: time.Nanosecond})
	})
	return l.Addr().String()
}

// eventually waits until ok says so.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(20 * time.Second)
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("not within 20s: %s", what)
		}
	}
}

func (c *cluster) waitHealthy(nodes int) {
	c.t.Helper()
	admin := c.as("admin", role.Grant{Project: "root", Role: role.Admin})
	eventually(c.t, "all nodes healthy", func() bool {
		res, err := admin.cluster.GetStatus(c.t.Context(), connect.NewRequest(&opendsecv1.GetStatusRequest{}))
		if err != nil {
			c.t.Fatal(err)
		}
		healthy := 0
		for _, n := range res.Msg.GetNodes() {
			if n.GetHealthy() {
				healthy++
			}
		}
		return healthy == nodes
	})
}

// user is someone with a token.
type user struct {
	c         *cluster
	name      string
	token     string
	sandboxes opendsecv1connect.SandboxServiceClient
	images    opendsecv1connect.ImageServiceClient
	cluster   opendsecv1connect.ClusterServiceClient
	identity  opendsecv1connect.IdentityServiceClient
}

// as makes a caller with a grant, unless it is there, and a token for it.
func (c *cluster) as(name string, grants ...role.Grant) *user {
	c.t.Helper()
	full, id, hash := token.New()
	now := time.Now()
	err := c.db.Change(c.t.Context(), store.Audit{Time: now, Action: "test"}, func(ch *store.Change) error {
		if _, err := ch.GetCaller(c.t.Context(), name); fault.Is(err, fault.NotFound) {
			if err := ch.CreateCaller(c.t.Context(), store.Caller{Name: name, Grants: grants, CreatedAt: now}); err != nil {
				return err
			}
		}
		return ch.CreateToken(c.t.Context(), store.Token{ID: id, Caller: name, Hash: hash, CreatedAt: now})
	})
	if err != nil {
		c.t.Fatal(err)
	}
	u := &user{c: c, name: name, token: full}
	u.connect()
	return u
}

func (u *user) connect(options ...connect.ClientOption) {
	options = append(options, connect.WithInterceptors(bearer(u.token)))
	u.sandboxes = opendsecv1connect.NewSandboxServiceClient(u.c.http, u.c.url, options...)
	u.images = opendsecv1connect.NewImageServiceClient(u.c.http, u.c.url, options...)
	u.cluster = opendsecv1connect.NewClusterServiceClient(u.c.http, u.c.url, options...)
	u.identity = opendsecv1connect.NewIdentityServiceClient(u.c.http, u.c.url, options...)
}

// bearer is an interceptor that sends a token.
type bearer string

func (b bearer) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		req.Header().Set("Authorization", "Bearer "+string(b))
		return next(ctx, req)
	}
}

func (b bearer) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, spec connect.Spec) connect.StreamingClientConn {
		conn := next(ctx, spec)
		conn.RequestHeader().Set("Authorization", "Bearer "+string(b))
		return conn
	}
}

func (b bearer) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}

func (c *cluster) admin() *user {
	return c.as("admin", role.Grant{Project: "root", Role: role.Admin})
}

func (c *cluster) developer() *user {
	return c.as("demo", role.Grant{Project: "root/demo", Role: role.Developer})
}

func (c *cluster) viewer() *user {
	return c.as("looker", role.Grant{Project: "root/demo", Role: role.Viewer})
}

func (c *cluster) stranger() *user {
	return c.as("stranger", role.Grant{Project: "root/other", Role: role.Developer})
}

// spec is one that a node can run.
func spec(change ...func(*opendsecv1.SandboxSpec)) *opendsecv1.SandboxSpec {
	s := &opendsecv1.SandboxSpec{Image: rootImage}
	for _, c := range change {
		c(s)
	}
	return s
}

// create makes a sandbox in root/demo.
func (u *user) create(change ...func(*opendsecv1.CreateSandboxRequest)) (*opendsecv1.Sandbox, error) {
	req := &opendsecv1.CreateSandboxRequest{Project: "root/demo", Spec: spec()}
	for _, c := range change {
		c(req)
	}
	res, err := u.sandboxes.CreateSandbox(u.c.t.Context(), connect.NewRequest(req))
	if err != nil {
		return nil, err
	}
	return res.Msg.GetSandbox(), nil
}

func (u *user) mustCreate(change ...func(*opendsecv1.CreateSandboxRequest)) *opendsecv1.Sandbox {
	u.c.t.Helper()
	sb, err := u.create(change...)
	if err != nil {
		u.c.t.Fatal(err)
	}
	return sb
}

func (u *user) get(id string) (*opendsecv1.Sandbox, error) {
	res, err := u.sandboxes.GetSandbox(u.c.t.Context(), connect.NewRequest(&opendsecv1.GetSandboxRequest{Id: id}))
	if err != nil {
		return nil, err
	}
	return res.Msg.GetSandbox(), nil
}

func (u *user) stop(id string) (*opendsecv1.Sandbox, error) {
	res, err := u.sandboxes.StopSandbox(u.c.t.Context(), connect.NewRequest(&opendsecv1.StopSandboxRequest{Id: id}))
	if err != nil {
		return nil, err
	}
	return res.Msg.GetSandbox(), nil
}

// problem returns the error as the API said it.
func problem(err error) *fault.Error { return fault.Of(fault.FromConnect(err)) }

// wantProblem checks an error's kind and field, and that it can be traced.
func wantProblem(t *testing.T, err error, kind fault.Kind, field string) *fault.Error {
	t.Helper()
	if err == nil {
		t.Fatalf("no error; want %s of field %q", kind, field)
	}
	p := problem(err)
	if p.Kind != kind || p.Field != field {
		t.Errorf("got %s of field %q (%v); want %s of field %q", p.Kind, p.Field, err, kind, field)
	}
	if p.RequestID == "" {
		t.Errorf("%v has no request id", err)
	}
	return p
}
