package iam_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/timestamppb"

	iamv1 "github.com/kernflux/opendsec/api/gen/iam/v1"
	"github.com/kernflux/opendsec/api/gen/iam/v1/iamv1connect"
	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/api/gen/opendsec/v1/opendsecv1connect"
	"github.com/kernflux/opendsec/internal/ca"
	"github.com/kernflux/opendsec/internal/daemon"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/iam"
	"github.com/kernflux/opendsec/internal/mtls"
	"github.com/kernflux/opendsec/internal/store"
	"github.com/kernflux/opendsec/internal/store/storetest"
)

// world is an iam behind mutual TLS, as it runs.
type world struct {
	db      *store.DB
	dir     string // of the authority
	url     string
	clock   *clock
	secrets iam.Secrets
	log     *bytes.Buffer
}

type clock struct {
	mu  sync.Mutex // guards now
	now time.Time
}

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clock) advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

func newWorld(t *testing.T, cfg iam.Config) *world {
	t.Helper()
	w := &world{db: storetest.SQLite(t), dir: t.TempDir(), clock: &clock{now: time.Now()}, log: new(bytes.Buffer)}
	cfg.Now = w.clock.Now
	c, err := ca.Init(w.dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range []string{mtls.RoleIAM, mtls.RoleAPIServer, mtls.RoleEdge} {
		if err := c.Ensure(r, []string{"127.0.0.1"}); err != nil {
			t.Fatal(err)
		}
	}
	if w.secrets, err = iam.Bootstrap(t.Context(), w.db, iam.Names{}, nil); err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w.url = "https://" + ln.Addr().String()
	log := slog.New(slog.NewTextHandler(w.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	ctx, stop := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() {
		served <- daemon.Serve(ctx, daemon.Server{
			Listener: ln, TLS: w.identity(t, mtls.RoleIAM).ServerConfig(), Handler: iam.New(cfg, w.db, log).Handler(), Log: log,
		})
	}()
	t.Cleanup(func() {
		stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
		for _, secret := range []string{w.secrets.Admin, w.secrets.Demo} {
			if strings.Contains(w.log.String(), secret[17:]) {
				t.Error("the log tells a token")
			}
		}
	})
	return w
}

func (w *world) identity(t *testing.T, role string) *mtls.Identity {
	t.Helper()
	id, err := mtls.Load(w.dir, role)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func (w *world) client(t *testing.T, role string) *http.Client {
	t.Helper()
	c := daemon.Client(w.identity(t, role).ClientConfig(mtls.RoleIAM))
	t.Cleanup(c.CloseIdleConnections)
	return c
}

func (w *world) auth(t *testing.T) iamv1connect.AuthClient {
	return iamv1connect.NewAuthClient(w.client(t, mtls.RoleAPIServer), w.url)
}

// as returns the IdentityService as the owner of a token calls it.
func (w *world) as(t *testing.T, token string) opendsecv1connect.IdentityServiceClient {
	bearer := connect.UnaryInterceptorFunc(func(next connect.UnaryFunc) connect.UnaryFunc {
		return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
			if token != "" {
				req.Header().Set("Authorization", "Bearer "+token)
			}
			return next(ctx, req)
		}
	})
	return opendsecv1connect.NewIdentityServiceClient(w.client(t, mtls.RoleAPIServer), w.url, connect.WithInterceptors(bearer))
}

// caller makes a caller with roles, given as project, role, project, role …,
// and returns a token of it.
func (w *world) caller(t *testing.T, name string, grants ...string) string {
	t.Helper()
	admin := w.as(t, w.secrets.Admin)
	req := &opendsecv1.CreateCallerRequest{Name: name}
	for i := 0; i < len(grants); i += 2 {
		req.Grants = append(req.Grants, &opendsecv1.RoleGrant{Project: grants[i], Role: grants[i+1]})
	}
	must(t)(call(t, admin.CreateCaller, req))
	return w.token(t, w.secrets.Admin, name).GetSecret()
}

func (w *world) token(t *testing.T, with, name string) *opendsecv1.CreateTokenResponse {
	t.Helper()
	res, err := call(t, w.as(t, with).CreateToken, &opendsecv1.CreateTokenRequest{Caller: name, Description: "for a test"})
	if err != nil {
		t.Fatal(err)
	}
	return res
}

// call makes a call and returns its answer, or its error as a fault.
func call[Req, Res any](t *testing.T, f func(context.Context, *connect.Request[Req]) (*connect.Response[Res], error), req *Req) (*Res, error) {
	t.Helper()
	res, err := f(t.Context(), connect.NewRequest(req))
	if err != nil {
		return nil, fault.FromConnect(err)
	}
	return res.Msg, nil
}

func must(t *testing.T) func(any, error) {
	return func(_ any, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
}

func wantKind(t *testing.T, what string, err error, kind fault.Kind) {
	t.Helper()
	if kind == "" {
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
		return
	}
	if !fault.Is(err, kind) {
		t.Errorf("%s: got %v, want %s", what, err, kind)
	}
}

func TestOnlyTheAPIMayCall(t *testing.T) {
	w := newWorld(t, iam.Config{})
	c := iamv1connect.NewAuthClient(w.client(t, mtls.RoleEdge), w.url)
	_, err := call(t, c.Authenticate, &iamv1.AuthenticateRequest{Token: w.secrets.Admin})
	wantKind(t, "an edge with a good token", err, fault.PermissionDenied)
}

func TestAuthenticate(t *testing.T) {
	w := newWorld(t, iam.Config{})
	auth := w.auth(t)
	res, err := call(t, auth.Authenticate, &iamv1.AuthenticateRequest{Token: w.secrets.Demo})
	if err != nil {
		t.Fatal(err)
	}
	want := &opendsecv1.Caller{Name: "demo", Grants: []*opendsecv1.RoleGrant{{Project: "root/demo", Role: "developer"}}}
	if d := cmp.Diff(want, res.GetCaller(), protocmp.Transform(), protocmp.IgnoreFields(&opendsecv1.Caller{}, "created_at")); d != "" {
		t.Error(d)
	}
	if !strings.HasPrefix(w.secrets.Demo, "ods_"+res.GetTokenId()+"_") || res.GetExpiresAt() != nil {
		t.Errorf("got token id %q, end %v", res.GetTokenId(), res.GetExpiresAt())
	}

	other := newWorld(t, iam.Config{})
	typo := []byte(w.secrets.Demo)
	if typo[20]++; !strings.Contains("123456789BCDEFGHIJKLMNOPQRSTUVWXYZbcdefghijklmnopqrstuvwxyz", string(typo[20])) {
		typo[20] = 'a' // it was the last of its kind
	}
	ending, err := call(t, w.as(t, w.secrets.Admin).CreateToken, &opendsecv1.CreateTokenRequest{
		Caller: "demo", ExpiresAt: timestamppb.New(w.clock.Now().Add(time.Hour)),
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ token, want string }{
		{"", "no token"}, {"junk", "no token"}, {string(typo), "mistyped"}, {other.secrets.Demo, "not known"},
	} {
		_, err := call(t, auth.Authenticate, &iamv1.AuthenticateRequest{Token: c.token})
		if !fault.Is(err, fault.Unauthenticated) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("got %v, want unauthenticated and %q", err, c.want)
		}
	}
	if res, err = call(t, auth.Authenticate, &iamv1.AuthenticateRequest{Token: ending.GetSecret()}); err != nil || res.GetExpiresAt() == nil {
		t.Errorf("before its end: %v, %v", res, err)
	}
	w.clock.advance(time.Hour)
	_, err = call(t, auth.Authenticate, &iamv1.AuthenticateRequest{Token: ending.GetSecret()})
	wantKind(t, "after its end", err, fault.Unauthenticated)

	must(t)(call(t, w.as(t, w.secrets.Demo).RevokeToken, &opendsecv1.RevokeTokenRequest{Id: w.secrets.Demo[4:16]}))
	_, err = call(t, auth.Authenticate, &iamv1.AuthenticateRequest{Token: w.secrets.Demo})
	wantKind(t, "after its revocation", err, fault.Unauthenticated)
	_, err = call(t, w.as(t, w.secrets.Demo).WhoAmI, &opendsecv1.WhoAmIRequest{})
	wantKind(t, "WhoAmI after its revocation", err, fault.Unauthenticated)
	_, err = call(t, w.as(t, "").WhoAmI, &opendsecv1.WhoAmIRequest{})
	wantKind(t, "WhoAmI without a token", err, fault.Unauthenticated)

	gone := w.caller(t, "gone")
	must(t)(call(t, w.as(t, w.secrets.Admin).DeleteCaller, &opendsecv1.DeleteCallerRequest{Name: "gone"}))
	_, err = call(t, auth.Authenticate, &iamv1.AuthenticateRequest{Token: gone})
	wantKind(t, "the token of a deleted caller", err, fault.Unauthenticated)
}

// Who may do what: each call by callers of each kind, in an order in which all
// that is allowed also works.
func TestRights(t *testing.T) {
	w := newWorld(t, iam.Config{})
	tokens := map[string]string{
		"admin": w.secrets.Admin, "dev": w.secrets.Demo,
		"lead":   w.caller(t, "lead", "root/demo", "admin"),
		"viewer": w.caller(t, "viewer", "root/demo", "viewer"),
		"nobody": w.caller(t, "nobody"),
	}
	w.caller(t, "both", "root/demo", "developer", "root", "viewer")
	id := func(secret string) string { return secret[4:16] }
	grant := func(project, role string) []*opendsecv1.RoleGrant {
		return []*opendsecv1.RoleGrant{{Project: project, Role: role}}
	}
	const ok, no, hidden = fault.Kind(""), fault.PermissionDenied, fault.NotFound
	for _, c := range []struct {
		who  string
		what string
		do   func(opendsecv1connect.IdentityServiceClient) error
		want fault.Kind
	}{
		{"viewer", "make a project", createProject(t, "root/demo/v"), no},
		{"dev", "make a project", createProject(t, "root/demo/d"), no},
		{"nobody", "make a project", createProject(t, "root/demo/n"), hidden},
		{"lead", "make a project below", createProject(t, "root/demo/l"), ok},
		{"lead", "make it again", createProject(t, "root/demo/l"), fault.AlreadyExists},
		{"lead", "make a project elsewhere", createProject(t, "root/l"), hidden},
		{"admin", "make a project", createProject(t, "root/a"), ok},
		{"admin", "make a second root", createProject(t, "top"), fault.InvalidArgument},
		{"lead", "set the quota below", setQuota(t, "root/demo/l"), ok},
		{"lead", "set its own quota", setQuota(t, "root/demo"), no},
		{"admin", "set any quota", setQuota(t, "root/demo"), ok},
		{"lead", "delete its own project", deleteProject(t, "root/demo"), no},
		{"lead", "delete a project below", deleteProject(t, "root/demo/l"), ok},
		{"admin", "delete root", deleteProject(t, "root"), fault.WrongState},
		{"viewer", "see a project", getProject(t, "root/demo"), ok},
		{"viewer", "see another", getProject(t, "root/a"), hidden},
		{"nobody", "see a project", getProject(t, "root/demo"), hidden},

		{"lead", "make a caller below", createCaller(t, "c1", grant("root/demo", "admin")), ok},
		{"lead", "make a caller above", createCaller(t, "c2", grant("root", "viewer")), no},
		{"lead", "make a caller without a role", createCaller(t, "c3", nil), no},
		{"dev", "make a caller", createCaller(t, "c4", grant("root/demo", "viewer")), no},
		{"admin", "make a caller without a role", createCaller(t, "c5", nil), ok},
		{"admin", "make it again", createCaller(t, "c5", nil), fault.AlreadyExists},
		{"admin", "make a caller with a bad name", createCaller(t, "C 6", nil), fault.InvalidArgument},
		{"admin", "make a caller with a bad role", createCaller(t, "c7", grant("root", "owner")), fault.InvalidArgument},
		{"lead", "give a role below", giveRole(t, "c5", "root/demo", "developer"), ok},
		{"lead", "give a role above", giveRole(t, "lead", "root", "admin"), hidden},
		{"dev", "give itself a role", giveRole(t, "demo", "root/demo", "admin"), no},
		{"lead", "give a role to one who is not there", giveRole(t, "ghost", "root/demo", "viewer"), fault.NotFound},
		{"lead", "take a role away", giveRole(t, "c5", "root/demo", ""), ok},
		{"lead", "delete one of its own", deleteCaller(t, "c1"), ok},
		{"lead", "delete one with a role elsewhere", deleteCaller(t, "both"), no},
		{"lead", "delete the admin", deleteCaller(t, "admin"), no},
		{"nobody", "delete another", deleteCaller(t, "viewer"), no},
		{"admin", "delete the last admin", deleteCaller(t, "admin"), fault.WrongState},
		{"admin", "take its own last role away", giveRole(t, "admin", "root", ""), fault.WrongState},

		{"viewer", "make itself a token", createToken(t, "viewer"), ok},
		{"viewer", "make another a token", createToken(t, "demo"), no},
		{"lead", "make a token for one of its own", createToken(t, "demo"), ok},
		{"lead", "make a token for one with a role elsewhere", createToken(t, "both"), no},
		{"lead", "make a token for the admin", createToken(t, "admin"), no},
		{"lead", "list the admin's tokens", listTokens(t, "admin"), no},
		{"lead", "list the tokens of one of its own", listTokens(t, "demo"), ok},
		{"lead", "revoke the admin's token", revoke(t, id(w.secrets.Admin)), no},
		{"lead", "revoke the token of one of its own", revoke(t, id(tokens["viewer"])), ok},
		{"viewer", "use a revoked token", getProject(t, "root/demo"), fault.Unauthenticated},
		{"admin", "revoke a token that is not there", revoke(t, "aaaaaaaaaaaa"), fault.NotFound},
		{"admin", "revoke something else", revoke(t, w.secrets.Demo), fault.InvalidArgument},
	} {
		wantKind(t, c.who+" may "+c.what, c.do(w.as(t, tokens[c.who])), c.want)
	}
	auditTellsAll(t, w)
}

// auditTellsAll checks that the log has the changes that were made and those
// that were refused, with their callers and without a secret.
func auditTellsAll(t *testing.T, w *world) {
	t.Helper()
	entries, err := w.db.ListAudit(t.Context(), w.clock.Now().Add(time.Hour), 1000)
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]bool{}
	for _, e := range entries {
		got[e.Caller+" "+e.Action+" "+e.Subject+" "+e.Outcome] = true
		if strings.Contains(e.Subject, "ods_") {
			t.Errorf("the audit log tells a token: %+v", e)
		}
		if e.Action == "CreateProject" && e.TokenID == "" {
			t.Errorf("the audit log lacks the token: %+v", e)
		}
	}
	for _, want := range []string{
		" Bootstrap admin, demo done", "lead CreateProject root/demo/l done", "lead CreateProject root/demo/l already_exists",
		"demo Grant demo admin on root/demo permission_denied", "lead Grant c5 none on root/demo done",
		"lead DeleteCaller admin permission_denied", "admin DeleteCaller admin wrong_state",
	} {
		if !got[want] {
			t.Errorf("the audit log lacks %q", want)
		}
	}
}

func TestListsShowWhatTheCallerMaySee(t *testing.T) {
	w := newWorld(t, iam.Config{})
	lead := w.caller(t, "lead", "root/demo", "admin")
	w.caller(t, "both", "root/demo", "developer", "root", "viewer")
	nobody := w.caller(t, "nobody")
	for token, want := range map[string]struct{ projects, callers string }{
		w.secrets.Admin: {"root root/demo", "admin(root=admin) both(root=viewer root/demo=developer) demo(root/demo=developer) lead(root/demo=admin) nobody()"},
		lead:            {"root/demo", "both(root/demo=developer) demo(root/demo=developer) lead(root/demo=admin)"},
		w.secrets.Demo:  {"root/demo", "demo(root/demo=developer)"},
		nobody:          {"", "nobody()"},
	} {
		projects, err := call(t, w.as(t, token).ListProjects, &opendsecv1.ListProjectsRequest{})
		if err != nil {
			t.Fatal(err)
		}
		var paths []string
		for _, p := range projects.GetProjects() {
			paths = append(paths, p.GetPath())
		}
		callers, err := call(t, w.as(t, token).ListCallers, &opendsecv1.ListCallersRequest{})
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, c := range callers.GetCallers() {
			var grants []string
			for _, g := range c.GetGrants() {
				grants = append(grants, g.GetProject()+"="+g.GetRole())
			}
			names = append(names, c.GetName()+"("+strings.Join(grants, " ")+")")
		}
		if got := strings.Join(paths, " "); got != want.projects {
			t.Errorf("projects %q, want %q", got, want.projects)
		}
		if got := strings.Join(names, " "); got != want.callers {
			t.Errorf("callers %q, want %q", got, want.callers)
		}
	}
}

func TestTokenLimits(t *testing.T) {
	w := newWorld(t, iam.Config{MaxTokens: 3})
	at := func(d time.Duration) *timestamppb.Timestamp { return timestamppb.New(w.clock.Now().Add(d)) }
	short, err := call(t, w.as(t, w.secrets.Demo).CreateToken, &opendsecv1.CreateTokenRequest{Caller: "demo", ExpiresAt: at(time.Hour)})
	if err != nil {
		t.Fatal(err)
	}
	for what, c := range map[string]struct {
		req  *opendsecv1.CreateTokenRequest
		want fault.Kind
	}{
		"one that never ends, with one that does": {&opendsecv1.CreateTokenRequest{Caller: "demo"}, fault.InvalidArgument},
		"one that ends later":                     {&opendsecv1.CreateTokenRequest{Caller: "demo", ExpiresAt: at(2 * time.Hour)}, fault.InvalidArgument},
		"one that ended":                          {&opendsecv1.CreateTokenRequest{Caller: "demo", ExpiresAt: at(-time.Second)}, fault.InvalidArgument},
		"a long description":                      {&opendsecv1.CreateTokenRequest{Caller: "demo", ExpiresAt: at(time.Minute), Description: strings.Repeat("é", 201)}, fault.InvalidArgument},
		"a third":                                 {&opendsecv1.CreateTokenRequest{Caller: "demo", ExpiresAt: at(time.Minute), Description: strings.Repeat("é", 200)}, ""},
	} {
		_, err := call(t, w.as(t, short.GetSecret()).CreateToken, c.req)
		wantKind(t, what, err, c.want)
	}
	_, err = call(t, w.as(t, w.secrets.Demo).CreateToken, &opendsecv1.CreateTokenRequest{Caller: "demo"})
	wantKind(t, "a fourth", err, fault.QuotaExceeded)
	w.clock.advance(2 * time.Hour)
	_, err = call(t, w.as(t, w.secrets.Demo).CreateToken, &opendsecv1.CreateTokenRequest{Caller: "demo"})
	wantKind(t, "another when two have ended", err, "")
	res, err := call(t, w.as(t, w.secrets.Demo).ListTokens, &opendsecv1.ListTokensRequest{})
	if err != nil || len(res.GetTokens()) != 4 {
		t.Errorf("got %v, %v; want 4 tokens, ended ones too", res, err)
	}
}

func TestBootstrap(t *testing.T) {
	db, ctx := storetest.SQLite(t), t.Context()
	crash := errors.New("disk full")
	var saved iam.Secrets
	_, err := iam.Bootstrap(ctx, db, iam.Names{Admin: "boss"}, func(s iam.Secrets) error { saved = s; return crash })
	if !errors.Is(err, crash) {
		t.Errorf("got %v, want the error of save", err)
	}
	if _, err := db.GetCaller(ctx, "boss"); !fault.Is(err, fault.NotFound) {
		t.Errorf("a caller whose token was not saved is there: %v", err)
	}
	first := saved
	made, err := iam.Bootstrap(ctx, db, iam.Names{Admin: "boss"}, func(s iam.Secrets) error { saved = s; return nil })
	if err != nil || made != saved || made == first || made.Admin == "" || made.Demo == "" {
		t.Errorf("got %v, %v", made, err)
	}
	again, err := iam.Bootstrap(ctx, db, iam.Names{Admin: "boss"}, func(iam.Secrets) error { return crash })
	if err != nil || again != (iam.Secrets{}) {
		t.Errorf("a second run: %v, %v", again, err)
	}
	third, err := iam.Bootstrap(ctx, db, iam.Names{Admin: "boss", Demo: "demo2"}, nil)
	if err != nil || third.Admin != "" || third.Demo == "" {
		t.Errorf("with one new name: %v, %v", third, err)
	}
	if _, err := iam.Bootstrap(ctx, db, iam.Names{Admin: "x", Demo: "x"}, nil); err == nil {
		t.Error("one name for two callers was accepted")
	}
}
