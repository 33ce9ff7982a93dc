package fault

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"strings"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
)

// wireError is an error as Connect writes it: the body of an answer, or a part
// of a stream's last message.
type wireError struct {
	Code    string       `json:"code"`
	Message string       `json:"message"`
	Details []wireDetail `json:"details,omitempty"`
}

type wireDetail struct {
	Type  string `json:"type"`
	Value string `json:"value"` // base64 without padding
}

// ToJSON renders err as Connect's JSON object for errors, for streams that are
// not Connect's own.
func ToJSON(err error) []byte {
	var ce *connect.Error
	errors.As(ToConnect(err), &ce)
	out := wireError{Code: ce.Code().String(), Message: ce.Message()}
	for _, d := range ce.Details() {
		out.Details = append(out.Details, wireDetail{d.Type(), base64.RawStdEncoding.EncodeToString(d.Bytes())})
	}
	body, jerr := json.Marshal(out)
	if jerr != nil {
		panic(jerr) // strings only
	}
	return body
}

// FromJSON reads what ToJSON wrote, or the body of an answer that refuses a
// call. What is neither is an Internal error without a message.
func FromJSON(body []byte) *Error {
	var in wireError
	if err := json.Unmarshal(body, &in); err != nil {
		return &Error{Kind: Internal}
	}
	for _, d := range in.Details {
		value, err := base64.RawStdEncoding.DecodeString(strings.TrimRight(d.Value, "="))
		info := &opendsecv1.ErrorInfo{}
		if d.Type == string(info.ProtoReflect().Descriptor().FullName()) && err == nil && proto.Unmarshal(value, info) == nil {
			return fromInfo(info, in.Message)
		}
	}
	return &Error{Kind: Internal, Message: in.Message}
}
