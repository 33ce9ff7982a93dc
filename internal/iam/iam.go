// Package iam is the component that keeps who may do what: projects with
// their quotas, callers with their roles, and tokens. It answers people through
// opendsec.v1.IdentityService, which the API passes on with their bearer
// token, and the API through iam.v1.Auth. Every change is in the audit log. It
// does not decide on sandboxes and images: the API does, by the roles that
// Authenticate returns.
package iam

import (
	"errors"
	"log/slog"
	"net/http"
	"time"

	"connectrpc.com/connect"

	"github.com/kernflux/opendsec/api/gen/iam/v1/iamv1connect"
	"github.com/kernflux/opendsec/api/gen/opendsec/v1/opendsecv1connect"
	"github.com/kernflux/opendsec/internal/mtls"
	"github.com/kernflux/opendsec/internal/rpc"
	"github.com/kernflux/opendsec/internal/store"
)

// Allow says which components may call iam.
var Allow = mtls.Allow{
	iamv1connect.AuthName:                 {mtls.RoleAPIServer},
	opendsecv1connect.IdentityServiceName: {mtls.RoleAPIServer},
}

// Config says how iam is to work. Its zero value works.
type Config struct {
	// MaxTokens is how many tokens a caller may have at a time; 0 means 100.
	MaxTokens int `json:"max_tokens,omitempty"`
	// Now tells the time; nil means time.Now.
	Now func() time.Time `json:"-"`
}

// Validate reports all faults of a configuration.
func (c Config) Validate() error {
	if c.MaxTokens < 0 {
		return errors.New("max_tokens: must not be negative")
	}
	return nil
}

// maxMessage bounds a request, in bytes.
const maxMessage = 1 << 20

// Service is iam. It serves what Handler returns and runs nothing else.
type Service struct {
	cfg Config
	db  *store.DB
	log *slog.Logger
}

// New returns an iam on a database.
func New(cfg Config, db *store.DB, log *slog.Logger) *Service {
	if cfg.MaxTokens == 0 {
		cfg.MaxTokens = 100
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	return &Service{cfg: cfg, db: db, log: log}
}

// Handler returns what iam serves to the roles of Allow. It wants TLS with the
// components' certificates around it.
func (s *Service) Handler() http.Handler {
	options := connect.WithHandlerOptions(connect.WithReadMaxBytes(maxMessage), connect.WithInterceptors(rpc.Interceptor(s.log)))
	mux := http.NewServeMux()
	mux.Handle(iamv1connect.NewAuthHandler(authRPC{s}, options))
	mux.Handle(opendsecv1connect.NewIdentityServiceHandler(identityRPC{s}, options,
		connect.WithInterceptors(connect.UnaryInterceptorFunc(s.identify))))
	return mtls.Handler(Allow, mux)
}
